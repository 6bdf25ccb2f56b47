"""One rank's shard of a model: built, loaded, copied, gathered and written as Hugging Face tensors.

Invariant: weights enter and leave only through `hf_mapping`, so loading, export and weight sync use one mapping in both
directions. Weights that leave have the adapters merged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from polyreme.config.trainer import LoraConfig, MoeConfig, Recompute
from polyreme.errors import ConfigError
from polyreme.weights.manifest import TensorSpec
from polyreme_trainer.megatron.batches.packing import PackedIds, packing
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.experts.moe import install_routing
from polyreme_trainer.megatron.experts.routing import Routing
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_files import open_tensors
from polyreme_trainer.megatron.huggingface.peft_files import PeftAdapter
from polyreme_trainer.megatron.layers.lora import Adapters
from polyreme_trainer.megatron.layers.rotary import angles
from polyreme_trainer.megatron.layers.spec import ModelSpec
from polyreme_trainer.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from polyreme_trainer.megatron.models.build import build_chunks, join_chunks, pick_spec, rank
from polyreme_trainer.megatron.offload.host_memory import HostMemory
from polyreme_trainer.megatron.parallel.context import context_ranks

DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}


@dataclass(frozen=True)
class TrainedParameters:
    """What of a model is trained: adapters, or all weights; with the gradient buffers. Without both, nothing."""

    adapters: Adapters | None = None
    ddp: list[DistributedDataParallel] = field(default_factory=list)


class ShardedModel:
    """This rank's part of a model.

    Args:
        spec: the model spec; None for the device's.
        recompute: the activations that a backward pass computes again.
        lora: the adapters to train instead of the weights. None: the weights are trained.
        moe: how experts are balanced. None: they are not balanced.
        seed: the seed of new adapters.

    Attributes:
        chunks: megatron-core's GPTModels, one for each of the rank's virtual stages.
        module: all of them under the names of `hf_mapping`.
        adapters: None without LoRA.
        ddp: the chunks wrapped for data parallelism, with their gradient buffers; none when frozen.
        routing: the state of the model's routers; None for a dense model.
        host: moves the weights between device and host memory; None: they stay on the device.
        context: the ranks that share the tokens of a micro-batch.
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: str,
        device: Device,
        *,
        trainable: bool,
        spec: ModelSpec | None = None,
        recompute: Recompute | None = None,
        lora: LoraConfig | None = None,
        moe: MoeConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.host: HostMemory | None = None
        self.spec = spec or pick_spec(device)
        self.chunks: list[GPTModel] = build_chunks(arch, DTYPES[dtype][0], device, self.spec, recompute)
        self.module = join_chunks(self.chunks)
        self.rank = rank()
        self.context = context_ranks(self.rank.tp if self.chunks[0].config.sequence_parallel else 1)
        self.slices = hf_mapping.rank_slices(arch, self.rank)
        self.routing = Routing(arch, self.rank, recompute is not None, device.torch) if arch.experts else None
        if self.routing is not None:
            install_routing(self.module, self.routing)
            if moe is not None:
                self.routing.balance(moe)
        self._params: dict[str, Tensor] = dict(self.module.named_parameters())
        self._params |= {name: buffer for name, buffer in self.module.named_buffers() if hf_mapping.is_expert_bias(name)}
        self.adapters: Adapters | None = None
        self._trained = self._params
        self.ddp: list[DistributedDataParallel] = []
        if trainable:
            self.make_trainable(lora, seed)
        else:
            self.module.requires_grad_(False)

    def make_trainable(self, lora: LoraConfig | None, seed: int = 0, *, critic: bool = False) -> None:
        """Makes new adapters the trained parameters, in place of earlier ones; with None, the weights. An earlier optimizer is
        unusable then, unless the earlier adapters are trained again with `train`.

        Args:
            critic: a language model's adapters have a zero value head. Raises ConfigError, see `Architecture.with_value_head`.
        """
        arch = self.arch.with_value_head() if critic else self.arch
        self.train(TrainedParameters())
        self.module.requires_grad_(True)
        self._use_adapters(None if lora is None else Adapters(self.module, arch, self.rank, lora, seed))
        copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        several = max(copies, parallel_state.get_expert_data_parallel_world_size()) > 1
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=several)
        with self.device.megatron():
            self.ddp = [DistributedDataParallel(chunk.config, config, chunk) for chunk in self.chunks]

    @property
    def trained(self) -> TrainedParameters:
        """What is trained now."""
        return TrainedParameters(self.adapters, self.ddp)

    def train(self, trained: TrainedParameters) -> None:
        """Trains the adapters of an earlier `trained` again, with their values, and makes their optimizer usable. Without
        adapters, and without gradient buffers, nothing is trained."""
        if self.adapters is not None:
            self.adapters.detach()
        if trained.adapters is not None:
            trained.adapters.attach()
        self.ddp = trained.ddp
        self._use_adapters(trained.adapters)

    def _use_adapters(self, adapters: Adapters | None) -> None:
        self.adapters = adapters
        self._trained = self._params if adapters is None else adapters.params
        if self.arch.head == "tied":
            # megatron-core sums the gradients of the embedding on the first and the last stage, and a value head is none.
            self.chunks[-1].share_embeddings_and_output_weights = adapters is None or adapters.head is None

    def use(self, *others: "ShardedModel") -> None:
        """Moves weights of this model and `others` to the device. With `trainer.offload.idle_models`, other models leave it."""
        if self.host is not None:
            self.host.use(self, *others)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the model keeps for longer than a step, except gradients."""
        yield from self.module.parameters()
        yield from self.module.buffers()

    @property
    def trained_arch(self) -> Architecture:
        """The mapping table of the parameters that training changes."""
        return self.arch if self.adapters is None else self.adapters.arch

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parameters by name, with the adapters added to them. Only parameters that an adapter changes are copies."""
        return self.state_dict() if self.adapters is None else self.adapters.merge(self._params)

    def load_hf(self, path: Path, loaded: Callable[[float], None] | None = None) -> None:
        """Loads this rank's slices from the safetensors of a Hugging Face directory. Raises ConfigError when they do not fit.

        Args:
            loaded: called after each slice with the fraction of this rank's slices that are loaded, up to 1.
        """
        with open_tensors(path) as tensors:
            tensors.check(hf_mapping.hf_shapes(self.arch), hf_mapping.hf_aliases(self.arch), self.arch.unread)
            self.load_slices(tensors, loaded)

    @torch.no_grad()
    def load_slices(self, tensors: Mapping[str, Tensor], loaded: Callable[[float], None] | None = None) -> None:
        """Copies this rank's slices from whole Hugging Face tensors. Padding becomes zero. `loaded`: see `load_hf`."""
        for param in self._params.values():
            param.zero_()
        name, tensor = "", None
        for number, piece in enumerate(self.slices, 1):
            if piece.hf_name != name:
                name, tensor = piece.hf_name, tensors[piece.hf_name]
            assert tensor is not None
            self._params[piece.param][piece.param_index].copy_(tensor[piece.hf_index])
            if loaded is not None:
                loaded(number / len(self.slices))

    @property
    def writes(self) -> bool:
        """Whether this rank writes its slices: whether it is one of the first ranks that together have the whole model."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return self.rank.tp_rank + self.rank.tp * copy < self.rank.places

    @property
    def written(self) -> set[str]:
        """The names of the tensors of which `write_slices` writes a slice."""
        return {piece.hf_name for piece in self.slices if piece.primary}

    @torch.no_grad()
    def write_slices(self, views: Mapping[str, Tensor]) -> None:
        """Copies this rank's primary slices into whole Hugging Face tensors. The ranks that have `writes` together fill them."""
        weights = self.weights()
        for piece in self.slices:
            if piece.primary:
                views[piece.hf_name][piece.hf_index].copy_(weights[piece.param][piece.param_index])

    def full_tensors(self) -> dict[str, Tensor] | None:
        """Whole Hugging Face tensors, on the CPU of the first stage's first tensor and expert rank; None on the others.
        Collective over all of these."""
        self.use()
        return self._full(self.arch, self.weights())

    def adapter(self, base: str, revision: str | None = None) -> PeftAdapter | None:
        """Adapters for PEFT, gathered as in `full_tensors`; also None without adapters. `base`, `revision`: see `PeftAdapter`."""
        self.use()
        tensors = None if self.adapters is None else self._full(self.adapters.arch, self.adapters.params)
        return None if self.adapters is None or tensors is None else PeftAdapter(tensors, self.adapters.lora, base, revision)

    @torch.no_grad()
    def _full(self, arch: Architecture, mine: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The whole tensors of a table. `mine`: this rank's parameters of the table. Collective as `full_tensors`."""
        here = self.rank
        ranks = [here.at(place) for place in range(here.places)]
        if here != ranks[0]:
            for _ in self._gather(mine, len(ranks)):
                pass
            return None
        owners = hf_mapping.stage_of_tensors(arch, here)
        biases = hf_mapping.expert_biases(arch)
        full = {
            name: torch.empty(shape, dtype=torch.float32 if name in biases else DTYPES[self.dtype][0])
            for name, shape in hf_mapping.hf_shapes(arch).items()
            if here.pp_rank in (0, owners[name])
        }
        pieces: dict[str, list[tuple[int, hf_mapping.Slice]]] = {name: [] for name in mine}
        for number, place in enumerate(ranks):
            for piece in hf_mapping.rank_slices(arch, place):
                if piece.primary:
                    pieces[piece.param].append((number, piece))
        for name, parts in self._gather(mine, len(ranks)):
            for number, piece in pieces[name]:
                full[piece.hf_name][piece.hf_index].copy_(parts[number][piece.param_index])
        return self._collect_stages(full, owners) if here.pp > 1 else full

    def _collect_stages(self, tensors: dict[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor] | None:
        """Sends every stage's tensors to the first stage, which returns all; None on the others."""
        group, here = parallel_state.get_pipeline_model_parallel_group(), self.rank.pp_rank
        for name, tensor in tensors.items():
            if owners[name] == 0:
                continue
            on_device = tensor.to(self.device.torch)
            if here:
                torch.distributed.send(on_device, parallel_state.get_pipeline_model_parallel_first_rank(), group=group)
            else:
                torch.distributed.recv(on_device, torch.distributed.get_global_rank(group, owners[name]), group=group)
                tensor.copy_(on_device)
        return None if here else tensors

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters of this rank that training changes, by name (not copies)."""
        self._check_on_device()
        return {name: param.detach() for name, param in self._trained.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state_dict` on a rank of the same layout. Raises KeyError or RuntimeError unless it fits."""
        if state.keys() != self._trained.keys():
            raise KeyError(f"parameters {sorted(state.keys() ^ self._trained.keys())} are not on both sides")
        for name, param in self._trained.items():
            param.copy_(state[name])

    def own_state_dict(self) -> dict[str, Tensor]:
        """`state_dict` without the parameters of which an earlier data or context rank has a copy. If the model has left the
        device, these are views of its copy in the host's memory. Do not change them."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        first = copy == 0, parallel_state.get_expert_data_parallel_rank() == 0
        mine = {name: param.detach() for name, param in self._trained.items() if first[hf_mapping.is_expert(name)]}
        return mine if self.host is None else {name: self.host.now(self, param) for name, param in mine.items()}

    def _check_on_device(self) -> None:
        assert self.host is None or self.host.has_on_device(self), "a model leaves the device when another is used"

    @property
    def alignment(self) -> int:
        """The number of tokens of a forward pass is a multiple of this: context ranks have equal shares of them and, with
        sequence parallelism, tensor ranks too."""
        return self.context.ranks * self.context.multiple

    @property
    def joins_beginnings(self) -> bool:
        """Whether sequences of a micro-batch may have tokens in common. Routers count each sequence's tokens, and context ranks
        cut whole sequences."""
        return self.context.ranks == 1 and not self.arch.experts

    def hidden(self, ids: Tensor | PackedIds, chunk: GPTModel | None = None) -> Tensor:
        """Final hidden states of t tokens, [t, hidden]; for a chunk before the last one, the input of the next chunk. With
        context ranks, the states of this rank's tokens, see `ContextRanks.cut`.

        A chunk after the model's first takes the input that the schedule has set instead of the ids.

        Args:
            ids: packed sequences; or int64 [b, s], b sequences of s tokens each, then t = b * s.
            chunk: one of `chunks`; None for the last.

        Raises ValueError for more positions than the model has.
        """
        self._check_on_device()
        tokens = PackedIds.of(ids)
        if (longest := max(tokens.lengths)) > self.arch.max_position:
            raise ValueError(f"expected at most {self.arch.max_position} positions; found {longest}")
        inputs, module = tokens.aligned(self.alignment), self.chunks[-1] if chunk is None else chunk
        cut = self.context.cut(tokens) if self.context.ranks > 1 else None
        full, sliding = (
            angles(rope, self.arch.head_dim, self.arch.max_position, self.device.torch) if rope else None
            for rope in (self.arch.rope, self.arch.sliding_rope)
        )
        assert full is not None
        if self.routing is not None:
            self.routing.place(cut)
        params = packing(inputs, self.arch.queries // self.rank.tp, full, sliding, module.config.params_dtype, cut)
        mine = inputs.ids if cut is None else inputs.ids.index_select(0, cut.tokens)
        embedded = module.embedding(input_ids=mine.unsqueeze(0), position_ids=None) if module.pre_process else None
        hidden = module.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=params)
        if not module.post_process:
            return hidden
        if module.config.sequence_parallel:  # each tensor rank has computed an equal run of them, and has the whole gradient
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden.squeeze(1)[: len(tokens.ids)] if cut is None else hidden.squeeze(1)

    def _gather(self, mine: Mapping[str, Tensor], count: int) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields every parameter's name and, on the first of the `count` tensor and expert ranks, the parameter of each of them;
        on the others an empty list."""
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        if self.rank.expert_places < self.rank.places:
            group = parallel_state.get_tensor_model_parallel_group()
        leads = torch.distributed.get_rank(group) == 0
        for name, param in mine.items():
            if count == 1:
                yield name, [param]
                continue
            parts = [torch.empty_like(param) for _ in range(count)] if leads else None
            torch.distributed.gather(param.detach().contiguous(), parts, group=group, group_dst=0)
            yield name, parts or []


def check_same_weights(model: ShardedModel) -> None:
    """Compares the weights that the data ranks have read on their machines. Collective. Raises ConfigError when they differ."""
    groups = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
    digests = xxhash.xxh3_64(), xxhash.xxh3_64()  # of the parameters that each group shares
    for name, param in model.weights().items():
        copy = param.to("cpu", copy=True)  # memory that numpy has seen cannot be given back, see `offload`
        digests[hf_mapping.is_expert(name)].update(copy.contiguous().view(torch.uint8).numpy().data)
    for group, digest in zip(groups, digests, strict=True):
        mine = torch.tensor([digest.intdigest() - 2**63], dtype=torch.int64, device=model.device.torch)
        every = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(every, mine, group=group)
        if len(different := {int(one) for one in every}) > 1:
            raise ConfigError(
                "the same weights at model.path on all machines of the learner",
                f"{len(different)} different ones",
                "Mount the same directory on all of them.",
            )


def tensor_specs(arch: Architecture, dtype: str) -> list[TensorSpec]:
    """The specs of every Hugging Face tensor of a version, in model order, from which a manifest is planned."""
    biases = hf_mapping.expert_biases(arch)
    return [
        TensorSpec(name, DTYPES["float32" if name in biases else dtype][1], shape)
        for name, shape in hf_mapping.hf_shapes(arch).items()
    ]
