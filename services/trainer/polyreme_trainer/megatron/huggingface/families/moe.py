"""The common parts of mixtures of experts: reading their sizes, and the rows of router and experts. The module is pure.

Invariant: every layer of such a model has experts, except the first where the family has `dense_layer`. Others raise ConfigError.
"""

from dataclasses import dataclass, replace

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import DENSE_LAYER, EXPERT, Architecture, MappingRow, ModelFamily
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

ATTENTION_LAYER = tuple(row for row in DENSE_LAYER if not row.param.startswith("mlp."))


def router(block: str) -> MappingRow:
    """The router's row. block: Hugging Face's name of the module with the experts and the router."""
    return MappingRow("mlp.router.weight", "all", {f"{block}.gate.weight": ("experts", "hidden")})


def expert(block: str, gate: str, up: str, down: str) -> tuple[MappingRow, ...]:
    """The rows of one expert, given Hugging Face's names of its three matrices."""
    param, name = f"{EXPERT}{{expert}}", f"{block}.experts.{{expert}}"
    shape = ("expert_ffn", "hidden")
    return (
        MappingRow(f"{param}.linear_fc1.weight", "gate_up", {f"{name}.{gate}.weight": shape, f"{name}.{up}.weight": shape}),
        MappingRow(f"{param}.linear_fc2.weight", "columns", {f"{name}.{down}.weight": ("hidden", "expert_ffn")}),
    )


SHARED_GATE = "mlp.shared_experts.gate_weight"
"""The name of the gate of the expert that every token passes, within a layer, where the family has one."""


def shared_expert(name: str) -> tuple[MappingRow, ...]:
    """The rows of the expert that every token passes. name: Hugging Face's name of its module."""
    shape = ("shared_ffn", "hidden")
    return (
        MappingRow(
            "mlp.shared_experts.linear_fc1.weight",
            "gate_up",
            {f"mlp.{name}.gate_proj.weight": shape, f"mlp.{name}.up_proj.weight": shape},
        ),
        MappingRow("mlp.shared_experts.linear_fc2.weight", "columns", {f"mlp.{name}.down_proj.weight": ("hidden", "shared_ffn")}),
    )


_DEFAULTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}


@dataclass(frozen=True)
class MoeFamily(ModelFamily):
    """A family of mixtures of experts.

    Attributes:
        expert_ffn: the field of config.json with the width of an expert.
        shared_ffn: the field with the width of the expert that every token passes; None without one.
        experts: the fields with the number of experts, of which the first one in the file counts.
    """

    expert_ffn: str = "moe_intermediate_size"
    shared_ffn: str | None = None
    experts: tuple[str, str] = ("num_experts", "num_local_experts")

    def architecture(self, config: HfConfig) -> Architecture:
        config = config.with_defaults({**_DEFAULTS, **self.defaults})
        config.only("mlp_only_layers", [])
        config.only("decoder_sparse_step", 1)
        newest, older = self.experts
        experts = config.integer(newest if newest in config else older)
        top_k = config.integer("num_experts_per_tok")
        if top_k > experts:
            raise ConfigError(
                f"num_experts_per_tok of at most {experts}, in {config.source}",
                str(top_k),
                "Restore the file from the model's source.",
            )
        return replace(
            super().architecture(config),
            experts=experts,
            top_k=top_k,
            expert_ffn=config.integer(self.expert_ffn),
            shared_ffn=0 if self.shared_ffn is None else config.integer(self.shared_ffn),
            renormalizes=config.flag("norm_topk_prob"),
            aux_loss_coef=config.number("router_aux_loss_coef", zero=True) if config.flag("output_router_logits") else 0.0,
        )
