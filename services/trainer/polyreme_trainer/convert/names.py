"""Converts parameter names between Megatron's layers, and checks names and shapes.

Invariant: in this package, parameters have the names of megatron-core's local layers as in the mapping table. The module is pure.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import Shape

OUTPUT_LAYER = "output_layer.weight"
CRITIC_HEAD, CRITIC_BIAS = "rm_head.weight", "rm_head.bias"

_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's names within a layer -> the names of megatron-core's local layers."""

_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_IGNORED = re.compile(r"(_extra_state\d*|rotary_pos_emb\.inv_freq)$")
_SHOWN = 12


def local_name(name: str) -> str:
    """A parameter's name in megatron-core's local layers, given that name or Transformer Engine's."""
    name = name.removeprefix("module.")
    for fused, local in _FUSED.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + local
    return _GROUPED.sub(r"mlp.experts.local_experts.\2.\1.weight", name)


def engine_name(name: str) -> str:
    """Transformer Engine's name for a parameter of megatron-core's local layers, in a model without experts.

    In the format torch_dist, megatron-core gives its local layers these names too.
    """
    for fused, local in _FUSED.items():
        if name.startswith("decoder.layers.") and name.endswith("." + local):
            return name.removesuffix(local) + fused
    return name


def engine_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a model without experts by Transformer Engine's names."""
    return {engine_name(name): value for name, value in state.items()}


def experts_engine_name(name: str) -> str:
    """As `engine_name`, in a model with experts, where the norm before the experts is a separate layer."""
    return name if name.endswith(".pre_mlp_layernorm.weight") else engine_name(name)


def local_names(state: Mapping[str, object]) -> dict[str, object]:
    """The parameters by their local names, without entries that are not weights."""
    return {local_name(name): value for name, value in state.items() if not _IGNORED.search(name)}


def check_shapes(expected: Mapping[str, Shape], found: Mapping[str, Shape], where: str) -> None:
    """Raises ConfigError with the missing tensors, the unexpected ones, and those with a wrong shape."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [
        f"{name} {found[name]} instead of {expected[name]}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    report = [
        f"{kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("shapes", sorted(other)))
        if names
    ]
    if report:
        raise ConfigError(
            f"the {len(expected)} tensors of the model in {where}",
            "; ".join(report),
            "Give the config.json that belongs to these weights, and --orm for a critic.",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    return ", ".join(listed[:_SHOWN] + more)
