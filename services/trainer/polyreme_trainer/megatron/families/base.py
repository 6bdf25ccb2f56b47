"""The shape of a decoder-only model, read from a Hugging Face config.json.

Everything downstream (the layout table, the megatron model) is built from this one record; a model whose forward pass would differ
from what the record can say is refused here, by name, before anything is allocated. Pure: no torch, no transformers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError

FAMILIES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: inverse frequencies are theta ** (-2i / head_dim), rescaled as Llama 3 does when `factor` > 1."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """The head_dim / 2 angular frequencies, in radians per position."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        return plain if self.factor == 1.0 else [self._llama3(f) for f in plain]

    def _llama3(self, frequency: float) -> float:
        turns = self.original_max_position * frequency / (2 * math.pi)
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Architecture:
    """Sizes of a Qwen2 or Llama model. `kv_heads` divides `heads`; `tied` means that the output layer is the embedding."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    norm_eps: float
    max_position: int
    rope: Rope

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Architecture":
        """Reads the content of a config.json. Raises ConfigError for what this trainer does not know."""
        family = config.get("model_type", "(none)")
        if family not in FAMILIES:
            raise ConfigError(
                f"a model of type {' or '.join(FAMILIES)}", f"model_type {family!r}", "Choose a model of a known type."
            )
        _refuse(config, "hidden_act", ("silu",), "silu")
        _refuse(config, "attention_bias", (False,), False)
        _refuse(config, "mlp_bias", (False,), False)
        _refuse(config, "use_sliding_window", (False,), False)
        _refuse(config, "attention_dropout", (0.0,), 0.0)
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            norm_eps=config["rms_norm_eps"],
            max_position=config["max_position_embeddings"],
            rope=_rope(config),
        )

    @classmethod
    def load(cls, path: Path) -> "Architecture":
        """Reads `path`/config.json. Raises ConfigError."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError("a Hugging Face model directory", f"no file {file}", "Set model.path to one with a config.json.")
        return cls.from_hf(json.loads(file.read_text()))

    @property
    def parameters(self) -> int:
        """Number of weights, a tied embedding counted once."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        layer = attention + bias + 3 * self.ffn * self.hidden + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


def _rope(config: Mapping[str, Any]) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    fields = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(
            theta,
            fields["factor"],
            fields["low_freq_factor"],
            fields["high_freq_factor"],
            fields["original_max_position_embeddings"],
        )
    raise ConfigError(
        "a rotary embedding of type default or llama3", f"rope_type {kind!r}", "Choose a model with one of these types."
    )


def _refuse(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any) -> None:
    value = config.get(key, default)
    if value not in known and value is not None:
        raise ConfigError(
            f"{key} in {list(known)}", f"{key} = {value!r} in the model's config.json", "Choose a model without this feature."
        )
