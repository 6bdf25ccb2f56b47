"""The experts of a layer, in both model specs: megatron-core's MoE layer with a router that decides as transformers and vLLM do.

Invariant: learner and replicas send a token to the same experts, except where the rounding of their matrix products differs.
"""

from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.hf_mapping import Rank
from polyreme_trainer.megatron.mcore import (
    GPTModel,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    SequentialMLP,
    SharedExpertMLP,
    TopKRouter,
)
from polyreme_trainer.megatron.routing import Replayed, Routing


class ExpertRouter(TopKRouter):
    """The logits are a product in the dtype of the model, as in transformers and vLLM; all that follows is fp32. Without expert bias.

    Attributes:
        trace: what the routers of the model share, see `follow`.
    """

    trace: Routing

    def gating(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight).float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights of the experts and which are chosen, fp32 and bool [rows, experts], from logits [..., experts]."""
        assert self.layer_number is not None
        layer = self.layer_number - 1
        rows = self.trace.rows(layer)
        self.router_replay = None if rows is None or rows.routes is None else Replayed(rows.routes[:, layer])
        probs, chosen = super().routing(logits)
        return self.trace.follow(layer, rows, logits.view(-1, self.num_experts), probs, chosen), chosen

    def _apply_expert_bias(self, *arguments: Any, **options: Any) -> None:
        """Does nothing, because there is no expert bias. megatron-core's method also does nothing, but its first call compiles it for seconds."""


def follow(module: GPTModel, trace: Routing) -> None:
    """Sets `trace` on all routers of a model."""
    for part in module.modules():
        if isinstance(part, ExpertRouter):
            part.trace = trace


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


def options(arch: Architecture, here: Rank) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig that describe router and experts; none for a dense model.

    megatron-core trains experts over several tensor ranks only together with sequence parallelism. Expert ranks exchange tokens by
    all-to-all, because their micro-batches have different numbers of tokens.
    """
    if not arch.experts:
        return {}
    return {
        "num_moe_experts": arch.experts,
        "moe_router_topk": arch.top_k,
        "moe_ffn_hidden_size": arch.expert_ffn,
        "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
        "moe_shared_expert_gate": arch.shared_ffn > 0,
        "moe_router_pre_softmax": not arch.renormalizes,  # a softmax over only the chosen experts equals softmax, then renormalization
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall" if here.ep > 1 or here.etp > 1 else "allgather",
        "expert_model_parallel_size": here.ep,
        "expert_tensor_parallel_size": here.expert_cut.tp,
        "sequence_parallel": here.tp > 1,
    }
