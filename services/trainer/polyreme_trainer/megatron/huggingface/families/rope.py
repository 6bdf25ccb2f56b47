"""The rotary position embedding in config.json. `megatron.rotary` computes the angles.

Invariant: a `Rope` exists only for a kind whose angles this package computes as transformers does. The module is pure.
"""

import math
from dataclasses import dataclass, replace

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.hf_config import FULL, SLIDING, HfConfig

DEFAULT_THETA = 10000.0
PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True)
class Rope:
    """One rotary embedding, the same in all layers.

    Attributes:
        theta: base of the inverse frequencies theta ** (-2i / head_dim).
        kind: "default", "linear" (all frequencies divided by `factor`), "llama3" or "yarn". The kind "dynamic" is read as
            "default": up to max_position_embeddings the two are equal, and no model runs beyond that.
        factor: the factor by which the context was extended.
        original_max_position: the context length of pre-training; for llama3 and yarn.
        low, high: for llama3, frequencies of at most `low` turns in the original context are divided by `factor`, and those of at
            least `high` turns are kept. For yarn the same, with `low` = beta_slow and `high` = beta_fast.
        truncate: for yarn, whether the limits of the interpolated dimensions are rounded to integers.
        attention_factor: for yarn, the factor of the rotated queries and keys, so that attention scores have its square.
        share: the part of a head's features that are rotated, the first ones; not for yarn, whose factor belongs to all features.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True
    attention_factor: float = 1.0
    share: float = 1.0

    def features(self, head_dim: int) -> int:
        """The number of rotated features of a head."""
        return int(head_dim * self.share)


def read_rope(config: HfConfig, max_position: int, share: float | None = None) -> Rope:
    """Reads both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (older).

    Args:
        share: transformers' default of `partial_rotary_factor` for the family; None: all features must be rotated.

    Raises:
        ConfigError: the embedding is not supported.
    """
    fields = config.section("rope_scaling") or config.section("rope_parameters")
    theta = config.number("rope_theta") if "rope_theta" in config else DEFAULT_THETA
    fields = fields.with_defaults({"rope_theta": theta})
    if share is not None:
        partial = config.with_defaults({PARTIAL: share}).number(PARTIAL)
        fields = fields.with_defaults({PARTIAL: partial})
    rope = read_rope_fields(fields, max_position, partial=share is not None)
    if rope.original_max_position:
        # transformers prefers it to the object's field.
        config.only("original_max_position_embeddings", rope.original_max_position)
    return rope


def read_rope_fields(fields: HfConfig, max_position: int, *, partial: bool = False) -> Rope:
    """Reads a rotary embedding's object with `rope_theta`. `partial`: it may rotate part of the features. Raises ConfigError."""
    fields = fields.with_defaults({"original_max_position_embeddings": max_position, "type": "default"})
    if not partial:
        fields.only(PARTIAL, 1.0)
    for name in _UNREAD:
        fields.absent(name)
    kind = fields.text("rope_type" if "rope_type" in fields else "type")
    rope = _read_kind(kind, fields, max_position)
    if not partial:
        return rope
    share = fields.number(PARTIAL)
    if share > 1 or (share < 1 and kind == "yarn"):
        raise ConfigError(f"{PARTIAL} of at most 1, and of 1 with yarn, in {fields.source}", f"{share:g} with {kind}", _CHOOSE)
    return replace(rope, share=share)


def _read_kind(kind: str, fields: HfConfig, max_position: int) -> Rope:
    """The rotary embedding of a kind. Raises ConfigError."""
    theta = fields.number("rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind == "dynamic":
        fields.number("factor")  # without effect up to max_position_embeddings, but transformers and vLLM require it
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, fields.number("factor"))
    original = fields.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise ConfigError(f"low_freq_factor below high_freq_factor in {fields.source}", f"{low} and {high}", _RESTORE)
        return Rope(theta, kind, fields.number("factor"), original, low, high)
    if kind == "yarn":
        return _read_yarn(fields, theta, original)
    raise ConfigError(f"a rope_type of default, dynamic, linear, llama3 or yarn in {fields.source}", kind, _CHOOSE)


_UNREAD = ("alpha", "max_trained_positions", "mrope_section", "rope_dim", "use_fope", FULL, SLIDING)
"""Fields that change the angles in vLLM, and the objects of kinds of layers in a model that has one rotary embedding for all."""
_RESTORE, _CHOOSE = "Restore the file from the model's source.", "Choose a model with one of these."


def _read_yarn(fields: HfConfig, theta: float, original: int) -> Rope:
    fields = fields.with_defaults({"beta_fast": 32, "beta_slow": 1, "truncate": True})
    factor = fields.number("factor")
    if "attention_factor" in fields:
        attention = fields.number("attention_factor")
    elif "mscale" in fields and "mscale_all_dim" in fields:
        attention = _mscale(factor, fields.number("mscale")) / _mscale(factor, fields.number("mscale_all_dim"))
    else:
        attention = _mscale(factor, 1.0)
    low, high = fields.number("beta_slow"), fields.number("beta_fast")
    return Rope(theta, "yarn", factor, original, low, high, fields.flag("truncate"), attention)


def _mscale(factor: float, scale: float) -> float:
    """Peng et al. 2023, equation 22, with DeepSeek's coefficient `scale`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
