"""Gemma 3, text models (270M, 1B): norms before and after attention and MLP, windows in five of six layers, scaled embeddings.

Invariant: every layer is either full or sliding, and each of the two kinds has its own rotary embedding.
"""

from dataclasses import replace

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import ATTENTION_BIAS, DENSE_LAYER, Architecture, MappingRow, ModelFamily
from polyreme_trainer.megatron.huggingface.families.hf_config import FULL, SLIDING, HfConfig
from polyreme_trainer.megatron.huggingface.families.qwen3 import HEAD_NORMS
from polyreme_trainer.megatron.huggingface.families.rope import Rope, read_rope_fields

_KINDS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""For each kind of layer, the older field of its rotary base and transformers' default."""


class _Gemma3(ModelFamily):
    def architecture(self, config: HfConfig) -> Architecture:
        arch = super().architecture(config)
        config = config.with_defaults(self.defaults)
        sliding = read_rope_fields(_rope_fields(config, SLIDING), arch.max_position)
        if sliding.attention_factor != arch.rope.attention_factor:
            raise ConfigError(
                f"rotary embeddings with the same attention_factor in all layers, in {config.source}",
                f"{arch.rope.attention_factor:g} in layers with full attention, "
                f"{sliding.attention_factor:g} in those with a window",
                "Choose a model without yarn.",
            )
        return replace(
            arch, sliding_rope=sliding, query_scale=config.number("query_pre_attn_scalar"), embedding_scale=arch.hidden**0.5
        )

    def sliding_layers(self, config: HfConfig, layers: int) -> tuple[bool, ...]:
        if "layer_types" not in config:
            pattern = config.integer("sliding_window_pattern")
            return tuple(layer % pattern != 0 for layer in range(1, layers + 1))
        kinds = config.texts("layer_types")
        if len(kinds) != layers or not set(kinds) <= set(_KINDS):
            raise ConfigError(
                f"layer_types: {layers} of {', '.join(_KINDS)}, in {config.source}",
                str(kinds)[:200],
                "Restore the file from the model's source.",
            )
        return tuple(kind == SLIDING for kind in kinds)

    def rope(self, config: HfConfig, max_position: int) -> Rope:
        return read_rope_fields(_rope_fields(config, FULL), max_position)


def _rope_fields(config: HfConfig, kind: str) -> HfConfig:
    """The rotary embedding of one kind of layer, in either spelling. A `rope_scaling` applies to layers with full attention."""
    older, theta = _KINDS[kind]
    theta = config.number(older) if older in config else theta
    fields = config.section("rope_parameters").section(kind)
    if kind == FULL and "rope_scaling" in config:
        fields = fields.merged(config.section("rope_scaling"))
    if "rope_type" not in fields:
        fields.absent("type")  # transformers ignores this older name in Gemma 3
    return fields.with_defaults({"rope_theta": theta})


LAYER = (
    *(row for row in DENSE_LAYER if row.param != "pre_mlp_layernorm.weight"),
    MappingRow("pre_mlp_layernorm.weight", "all", {"pre_feedforward_layernorm.weight": ("hidden",)}),
    MappingRow("self_attention.linear_proj.post_layernorm.weight", "all", {"post_attention_layernorm.weight": ("hidden",)}),
    MappingRow("mlp.linear_fc2.post_layernorm.weight", "all", {"post_feedforward_layernorm.weight": ("hidden",)}),
    *HEAD_NORMS,
)

FAMILY = _Gemma3(
    name="gemma3_text",
    layer=LAYER,
    options={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    biases={"attention_bias": ATTENTION_BIAS},
    activation="gelu_tanh",
    post_norms=True,
)
