"""Builds the megatron-core model of a Hugging Face architecture, and the process groups over which it is sharded.

The model is megatron-core's GPTModel with the layers of the device's spec.

Invariant: dropout is off everywhere, so forward passes in training and in evaluation are the same function.
"""

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from polyreme.config.trainer import ParallelConfig, Recompute
from polyreme.errors import ConfigError
from polyreme.net.torch_store import narrow_stores
from polyreme.process.gloo_device import share_gloo_device
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.experts import moe
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.layers.accelerator import CUDA, NPU
from polyreme_trainer.megatron.layers.cpu.spec import CPU
from polyreme_trainer.megatron.layers.spec import ModelSpec
from polyreme_trainer.megatron.mcore import GPTModel, TransformerConfig, initialize_rng_tracker, parallel_state
from polyreme_trainer.megatron.parallel.reshard import RankMesh

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def init_parallel(parallel: ParallelConfig, device: Device) -> None:
    """Joins the process group given by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and creates the groups of tensor ranks,
    context ranks, stages, data ranks and expert ranks.

    Tensor ranks are adjacent; so are a data rank's context ranks, and a stage's ranks. The ranks that share experts are adjacent
    data and context ranks. Every collective has a deadline. Raises ConfigError unless the world size is the configuration's.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != parallel.world_size:
        raise ConfigError(
            f"{parallel.world_size} learner ranks ({parallel.layout})",
            f"WORLD_SIZE={world}",
            "Start as many ranks as trainer.parallel requires.",
        )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core overlaps collectives by kernel order
    if device.kind == "cpu":
        share_gloo_device(torch.distributed.ProcessGroupGloo)
    narrow_stores(import_module("torch.distributed.rendezvous"))
    torch.distributed.init_process_group(device.backend, timeout=COLLECTIVE_TIMEOUT)
    initialize_rng_tracker(inference_rng_tracker=True)  # the tracker for models without dropout, which creates no generators
    create_groups(parallel, device)


def create_groups(parallel: ParallelConfig, device: Device) -> None:
    """Creates megatron-core's groups of a layout in the process group that all ranks have joined."""
    with device.megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor or parallel.tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        )


def close_parallel() -> None:
    """Destroys the process groups. The process may join others afterwards."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def rank() -> hf_mapping.Rank:
    """This process's coordinates in the model-parallel mesh."""
    tensor, cut = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_expert_tensor_parallel_world_size()
    own = {} if cut == tensor else {"etp_rank": parallel_state.get_expert_tensor_parallel_rank(), "etp": cut}
    return hf_mapping.Rank(
        parallel_state.get_tensor_model_parallel_rank(),
        tensor,
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        **own,
    )


def mesh() -> RankMesh:
    """The numbers of ranks of this process's model-parallel mesh."""
    here, copies = rank(), parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return RankMesh(here.tp, here.pp, copies, here.ep, here.vpp, here.etp)


class ValueHead(torch.nn.Module):
    """The output layer of a critic: hidden -> 1 without bias, the same on all tensor ranks. Weight [1, hidden]."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., 1]"""
        return torch.nn.functional.linear(hidden, self.weight)


def pick_spec(device: Device) -> ModelSpec:
    """The spec with the device's kernels."""
    return {"cpu": CPU, "cuda": CUDA, "npu": NPU}[device.kind]


def build_chunks(
    arch: Architecture, dtype: torch.dtype, device: Device, spec: ModelSpec, recompute: Recompute | None = None
) -> list[GPTModel]:
    """This rank's shard with uninitialised weights: a GPTModel per virtual stage. Raises ConfigError unless the sizes divide."""
    here = rank()
    try:
        hf_mapping.rank_slices(arch, here)
    except ValueError as error:
        raise ConfigError("sizes that divide over the ranks", str(error), "Change trainer.parallel.") from None
    config = transformer_config(arch, dtype, here, spec, recompute)
    has_experts = [arch.has_experts(layer) for layer in hf_mapping.layers_of(arch, here)]
    each = len(has_experts) // here.vpp
    chunks = []
    for number in range(here.vpp):
        first = here.pp_rank == 0 and number == 0
        last = here.pp_rank == here.pp - 1 and number == here.vpp - 1
        with device.megatron():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=spec.block(config, arch.family, has_experts[number * each : (number + 1) * each]),
                vocab_size=hf_mapping.padded_vocab(arch, here.tp),
                max_sequence_length=arch.max_position,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=arch.head == "tied",
                position_embedding_type="none",  # attention applies the angles of `packing`
                vp_stage=number if here.vpp > 1 else None,
            )
        if arch.embedding_scale != 1 and first:
            chunk.embedding.register_forward_hook(partial(_scale, arch.embedding_scale))
        if arch.head == "value" and last:
            chunk.output_layer = ValueHead(arch.hidden, dtype)
        if here.ep > 1 or here.etp:
            for name, param in chunk.named_parameters():
                if hf_mapping.is_expert(name):
                    param.allreduce = (
                        False  # over data ranks. megatron-core sums it over them when all ranks have the same experts
                    )
        chunks.append(chunk.to(device.torch))
    return chunks


def join_chunks(chunks: Sequence[GPTModel]) -> GPTModel:
    """One module with all chunks' modules, under the names of `hf_mapping`. Layer numbers continue from one chunk to the next."""
    if len(chunks) == 1:
        return chunks[0]
    whole, decoder = torch.nn.Module(), torch.nn.Module()
    whole.config, whole.decoder = chunks[0].config, decoder
    decoder.layers = torch.nn.ModuleList(layer for chunk in chunks for layer in chunk.decoder.layers)
    for chunk in chunks:
        parts = [(whole, chunk, "embedding"), (decoder, chunk.decoder, "final_layernorm"), (whole, chunk, "output_layer")]
        for parent, owner, name in parts:
            if isinstance(part := getattr(owner, name, None), torch.nn.Module):
                parent.add_module(name, part)
    return whole


def _scale(factor: float, _module: object, _arguments: object, embedded: Tensor) -> Tensor:
    """The token embeddings times `factor`, which transformers rounds to the dtype of the weights."""
    return embedded * torch.tensor(factor, dtype=embedded.dtype)


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}


def recomputation(recompute: Recompute | None, arch: Architecture) -> dict[str, object]:
    """The fields of megatron-core's TransformerConfig that select the activations that backward passes recompute."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        modules = [*(["moe"] if arch.experts else []), *(["mlp"] if arch.expert_layers < arch.layers else [])]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def transformer_config(
    arch: Architecture, dtype: torch.dtype, here: hf_mapping.Rank, spec: ModelSpec, recompute: Recompute | None = None
) -> TransformerConfig:
    """megatron-core's configuration of the architecture on this rank."""
    config = TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        softmax_scale=arch.rope.attention_factor**2 / math.sqrt(arch.query_scale or arch.head_dim),
        window_size=(arch.window - 1, 0) if arch.window else None,
        window_attn_skip_freq=[int(sliding) for sliding in arch.sliding] if arch.window else None,
        gated_linear_unit=True,
        add_bias_linear=False,  # see `spec.with_bias`
        add_qkv_bias=arch.family.has_bias("self_attention.linear_qkv"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=here.tp,
        pipeline_model_parallel_size=here.pp,
        virtual_pipeline_model_parallel_size=here.vpp if here.vpp > 1 else None,
        # With two messages at once between two ranks, the interleaved schedule would confuse them: wrong results, and no error.
        overlap_p2p_comm=here.vpp > 1,
        batch_p2p_comm=here.vpp == 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        calculate_per_token_loss=True,  # losses are divided by the global token count: ranks sum gradients, never average them
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        **moe.options(arch, here),
        **recomputation(recompute, arch),
        **spec.options,
        **arch.family.options,
    )
    config.variable_seq_lengths = True  # between stages. Set now: the constructor would refuse it for some layers with experts
    config.activation_func = _ACTIVATIONS[arch.family.activation]  # set now: the constructor knows no tanh approximation
    return config
