"""A policy: one rank's shard of a megatron-core model, its log-probabilities, and its traffic with Hugging Face tensors.

A frozen policy has no gradient buffers. Weights pass in and out only through the layout table, so what is loaded, exported and pushed
to replicas is the same mapping in both directions.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.weights.manifest import TensorSpec
from polyreme_trainer.megatron import hf_mapping
from polyreme_trainer.megatron.build import build_module, rank
from polyreme_trainer.megatron.cpu.attention import Batch
from polyreme_trainer.megatron.cpu.linear import linear
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.hf_files import open_tensors
from polyreme_trainer.megatron.logprobs import token_logprobs
from polyreme_trainer.megatron.mcore import DistributedDataParallel, DistributedDataParallelConfig, GPTModel, parallel_state

IGNORE = -100
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}


class Policy:
    """This rank's part of a model.

    Attributes:
        module: megatron-core's GPTModel.
        replica: the same wrapped for data parallelism, with its gradient buffers; None when frozen.
    """

    def __init__(self, arch: Architecture, dtype: str, device: Device, *, trainable: bool) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.module: GPTModel = build_module(arch, DTYPES[dtype][0], device)
        self.rank = rank()
        self.slices = hf_mapping.rank_slices(arch, self.rank)
        self._params = dict(self.module.named_parameters())
        per_rank = hf_mapping.padded_vocab(arch, self.rank.tp) // self.rank.tp
        self._vocab_start = self.rank.tp_rank * per_rank
        self._vocab_valid = max(0, min(per_rank, arch.vocab - self._vocab_start))
        self.replica: DistributedDataParallel | None = None
        if trainable:
            config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            with device.megatron():
                self.replica = DistributedDataParallel(self.module.config, config, self.module)
        else:
            self.module.requires_grad_(False)

    def logprobs(self, ids: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probabilities of `targets[b, t]` after `ids[b, : t + 1]`, differentiable in the weights: fp32 [b, s].

        Args:
            ids: int64 [b, s], padded on the right with any token of the vocabulary.
            targets: int64 [b, s]; where it is IGNORE nothing is computed, and the result is 0.
            temperature: divides the logits, as in sampling.
        """
        hidden = self._hidden(ids)
        flat = targets.reshape(-1)
        wanted = (flat != IGNORE).nonzero().squeeze(1)
        logits = self._logits(hidden.index_select(0, wanted))
        group = parallel_state.get_tensor_model_parallel_group() if self.rank.tp > 1 else None
        tokens = token_logprobs(
            logits, flat[wanted], start=self._vocab_start, valid=self._vocab_valid, temperature=temperature, group=group
        )
        return tokens.new_zeros(flat.shape).index_copy(0, wanted, tokens).view(targets.shape)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """All logits, gathered over the tensor ranks: fp32 [b, s, vocab]. For comparing models, not for training."""
        local = self._logits(self._hidden(ids)).float()
        if self.rank.tp > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(local) for _ in range(self.rank.tp)]
            torch.distributed.all_gather(parts, local.contiguous(), group=group)
            local = torch.cat(parts, dim=-1)
        return local[:, : self.arch.vocab].reshape(*ids.shape, -1)

    def load_hf(self, path: Path) -> None:
        """Loads this rank's slices from the safetensors of a Hugging Face directory. Raises ConfigError for what does not fit."""
        with open_tensors(path, hf_mapping.hf_shapes(self.arch)) as tensors:
            self.load_slices(tensors)

    @torch.no_grad()
    def load_slices(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this rank's slices out of whole Hugging Face tensors; padding becomes zero."""
        for param in self._params.values():
            param.zero_()
        name, tensor = "", None
        for piece in self.slices:
            if piece.hf_name != name:
                name, tensor = piece.hf_name, tensors[piece.hf_name]
            assert tensor is not None
            self._params[piece.param][piece.param_index].copy_(tensor[piece.hf_index])

    @torch.no_grad()
    def write_slices(self, views: Mapping[str, Tensor]) -> None:
        """Copies this rank's primary slices into whole Hugging Face tensors. Called on data rank 0's ranks; together they fill them."""
        for piece in self.slices:
            if piece.primary:
                views[piece.hf_name][piece.hf_index].copy_(self._params[piece.param][piece.param_index])

    @torch.no_grad()
    def full_tensors(self) -> dict[str, Tensor] | None:
        """Whole Hugging Face tensors on the first tensor rank (None on others), on the CPU. Called on all tensor ranks of a replica."""
        here = self.rank
        everyone = {here.tp_rank: self._params} if here.tp == 1 else self._gather_params()
        if here.tp_rank:
            return None
        shapes = hf_mapping.hf_shapes(self.arch)
        full = {name: torch.empty(shape, dtype=DTYPES[self.dtype][0]) for name, shape in shapes.items()}
        for tp_rank, params in everyone.items():
            for piece in hf_mapping.rank_slices(self.arch, hf_mapping.Rank(tp_rank, here.tp, here.pp_rank, here.pp)):
                if piece.primary:
                    full[piece.hf_name][piece.hf_index].copy_(params[piece.param][piece.param_index])
        return full

    def reference(self) -> "Policy":
        """A frozen copy with the weights of now."""
        copy = Policy(self.arch, self.dtype, self.device, trainable=False)
        with torch.no_grad():
            for name, param in self._params.items():
                copy._params[name].copy_(param)
        return copy

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters by name (not copies)."""
        return {name: param.detach() for name, param in self._params.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` gave on a rank of the same layout. Raises KeyError or RuntimeError when it does not fit."""
        if state.keys() != self._params.keys():
            raise KeyError(f"parameters {sorted(state.keys() ^ self._params.keys())} are not on both sides")
        for name, param in self._params.items():
            param.copy_(state[name])

    def _hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [b * s, hidden]."""
        size, width = ids.shape
        if width > self.arch.max_position:
            raise ValueError(f"{width} positions, but the model has {self.arch.max_position}")
        cos, sin = self._rotary_angles
        rows = self.module.embedding(input_ids=ids.reshape(1, -1), position_ids=None)
        batch = Batch(size=size, width=width, cos=cos[:width], sin=sin[:width])
        hidden = self.module.decoder(hidden_states=rows, attention_mask=None, packed_seq_params=batch)
        return hidden.squeeze(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, this rank's columns]."""
        weight = self.module.shared_embedding_or_output_weight() if self.arch.tied else self.module.output_layer.weight
        return linear(hidden, weight, None, parallel_state.get_tensor_model_parallel_group(), self.rank.tp > 1)

    @cached_property
    def _rotary_angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [max_position, 1, head_dim / 2], computed in fp32."""
        frequencies = torch.tensor(self.arch.rope.inverse_frequencies(self.arch.head_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(self.arch.max_position, dtype=torch.float32), frequencies).unsqueeze(1)
        cos, sin = (part.to(self.device.torch, DTYPES[self.dtype][0]) for part in (angles.cos(), angles.sin()))
        return cos, sin

    def _gather_params(self) -> dict[int, dict[str, Tensor]]:
        """Every tensor rank's parameters, on the first one."""
        group = parallel_state.get_tensor_model_parallel_group()
        first = torch.distributed.get_global_rank(group, 0)
        every: dict[int, dict[str, Tensor]] = {tp_rank: {} for tp_rank in range(self.rank.tp)}
        for name, param in self._params.items():
            parts = [torch.empty_like(param) for _ in every] if self.rank.tp_rank == 0 else None
            torch.distributed.gather(param.detach().contiguous(), parts, dst=first, group=group)
            for tp_rank, part in enumerate(parts or []):
                every[tp_rank][name] = part
        return every


def build_policy(config: RunConfig, device: Device, *, trainable: bool = True) -> Policy:
    """The run's model with the weights of its Hugging Face directory. Needs `init_parallel`. Raises ConfigError."""
    policy = Policy(Architecture.load(config.model.path), config.model.dtype, device, trainable=trainable)
    policy.load_hf(config.model.path)
    return policy


def check_same_weights(policy: Policy) -> None:
    """Compares what the data ranks have read, each on a machine of its own. Collective. Raises ConfigError where it differs."""
    digest = xxhash.xxh3_64()
    for param in policy.state_dict().values():
        digest.update(param.cpu().contiguous().view(torch.uint8).numpy().data)
    group = parallel_state.get_data_parallel_group()
    mine = torch.tensor([digest.intdigest() - 2**63], dtype=torch.int64, device=policy.device.torch)
    every = [torch.empty_like(mine) for _ in range(parallel_state.get_data_parallel_world_size())]
    torch.distributed.all_gather(every, mine, group=group)
    if len(different := {int(one) for one in every}) > 1:
        raise ConfigError(
            "the same weights at model.path on all machines of the learner",
            f"{len(different)} kinds",
            "Mount the same directory on all of them.",
        )


def tensor_specs(arch: Architecture, dtype: str) -> list[TensorSpec]:
    """What a manifest is planned from: every Hugging Face tensor of a version, in the order of the model."""
    return [TensorSpec(name, DTYPES[dtype][1], shape) for name, shape in hf_mapping.hf_shapes(arch).items()]
