"""The experts of a layer, in both model specs: megatron-core's MoE layer with a router that decides as transformers and vLLM do.

Invariant: learner and replicas send a token to the same experts, except where the rounding of their matrix products differs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.experts.routing import Replayed, Routing
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.moe import SHARED_GATE
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.mcore import (
    GPTModel,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    SequentialMLP,
    SharedExpertMLP,
    TopKRouter,
    TransformerConfig,
)


class ExpertRouter(TopKRouter):
    """The logits are a product in the dtype of the model, or in fp32 for scores that are sigmoids, as in transformers and vLLM;
    all that follows is fp32. With such scores the router has an expert bias, which is added to them for the choice only.

    Attributes:
        trace: the state that the routers of the model share, see `install_routing`.
        expert_bias: fp32 [experts], a buffer; None without one.
    """

    trace: Routing

    def __init__(self, config: TransformerConfig, **options: object) -> None:
        super().__init__(config, **options)
        if self.score_function == "sigmoid":
            del self.expert_bias  # None: megatron-core's own option for it would also update it, beside `Routing`
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))

    def gating(self, input: Tensor) -> Tensor:
        if self.score_function == "sigmoid":
            return _WideProduct.apply(input, self.weight)
        return torch.nn.functional.linear(input, self.weight).float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights of the experts and which are chosen, fp32 and bool [rows, experts], from logits [..., experts]."""
        assert self.layer_number is not None
        layer = self.layer_number - 1 - self.trace.arch.dense_layers
        rows = self.trace.rows(layer)
        self.router_replay = None if rows is None or rows.routes is None else Replayed(rows.routes[:, layer])
        probs, chosen = super().routing(logits)
        return self.trace.record_and_attach_loss(layer, rows, logits.view(-1, self.num_experts), probs, chosen), chosen

    def _apply_expert_bias(self, *arguments: object, **options: object) -> None:
        """Does nothing: `Routing` counts the choices. megatron-core's does no more, but its first call compiles for seconds."""


class _WideProduct(Function):
    """`input` [..., in] x `weight` [out, in] in fp32: fp32 [..., out]. Its backward pass needs no fp32 copy of the two."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return torch.nn.functional.linear(input.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (input, weight), (output,) = ctx.saved_tensors, grads
        of_weight = output.flatten(0, -2).t() @ input.float().flatten(0, -2)
        return (output @ weight.float()).to(input.dtype), of_weight.to(weight.dtype)


def install_routing(module: GPTModel, trace: Routing) -> None:
    """Sets `trace` on all routers of a model, and their expert biases on the trace."""
    for part in module.modules():
        if isinstance(part, ExpertRouter):
            part.trace = trace
            if part.expert_bias is not None:
                assert part.layer_number is not None
                trace.biases[part.layer_number - 1 - trace.arch.dense_layers] = part.expert_bias


def layer_specs(dense: ModuleSpec, mlp: MLPSubmodules, has_experts: Sequence[bool]) -> list[ModuleSpec]:
    """The module specs of the layers of a stage.

    Args:
        dense: the spec of a layer without experts.
        mlp: the submodules of an MLP, and of each expert.
        has_experts: for each layer, whether it has experts in place of its MLP.
    """
    sparse = replace(dense, submodules=replace(dense.submodules, mlp=experts(mlp)))
    return [sparse if has else dense for has in has_experts]


def experts(mlp: MLPSubmodules) -> ModuleSpec:
    """The module spec that takes the place of the MLP in a layer with experts; `mlp` is the spec of each expert."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=ExpertRouter,
            experts=ModuleSpec(module=SequentialMLP, submodules=mlp),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=mlp),
        ),
    )


def options(arch: Architecture, here: Rank) -> dict[str, object]:
    """The fields of megatron-core's TransformerConfig that describe router and experts; none for a dense model.

    megatron-core trains experts over several tensor ranks only together with sequence parallelism. Expert ranks exchange tokens
    by all-to-all, because their micro-batches have different numbers of tokens.
    """
    if not arch.experts:
        return {}
    return {
        "num_moe_experts": arch.experts,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.layers)] if arch.dense_layers else 1,
        "moe_router_topk": arch.top_k,
        "moe_ffn_hidden_size": arch.expert_ffn,
        "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
        "moe_shared_expert_gate": any(row.param == SHARED_GATE for row in arch.family.layer),
        "moe_router_score_function": arch.family.scores,
        "moe_router_topk_scaling_factor": None if arch.routed_scale == 1 else arch.routed_scale,
        "moe_router_pre_softmax": not arch.renormalizes,  # a softmax over only the chosen equals softmax, then renormalization
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall" if here.ep > 1 or here.etp > 1 else "allgather",
        "expert_model_parallel_size": here.ep,
        "expert_tensor_parallel_size": here.expert_cut.tp,
        "sequence_parallel": here.tp > 1,
    }
