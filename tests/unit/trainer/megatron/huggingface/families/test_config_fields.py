"""Compares the reading of config.json with that of transformers and vLLM.

- A file means to us what it means to transformers, whichever fields it omits and whichever older spelling it uses.
- A field that a model of transformers or vLLM reads is read here too, or refused, so that a new release cannot add one unnoticed.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import known_families, read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from support.models import FAMILY_FIELDS

SIZES = {
    "vocab_size": 45,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 5e3,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
}
SPELLINGS: list[dict[str, Any]] = [
    *({"rope_scaling": {key: kind, **rest}} for kind, rest in KINDS.items() for key in ("type", "rope_type")),
    *({"rope_parameters": {"rope_type": kind, **rest}} for kind, rest in KINDS.items()),
    *({"rope_parameters": {"rope_type": kind, "rope_theta": 77.0, **rest}} for kind, rest in KINDS.items()),
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 16},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": {"rope_theta": 77.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": NESTED},
    {"rope_parameters": NESTED},
    {"partial_rotary_factor": 0.5},
    {"sliding_window": 16},
    {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": None},
    {"layer_types": ["full_attention"] * 2},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    {"num_local_experts": 5, "num_experts": 5},
]


def raw(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json with every field that has a default, in the older spelling."""
    return {**SIZES, **FAMILY_FIELDS.get(model_type, {}), "model_type": model_type, **changes}


def read(fields: dict[str, Any]) -> Architecture | None:
    """None: refused."""
    try:
        return read_architecture(HfConfig(fields))
    except ConfigError:
        return None


def means_the_same_to_transformers(fields: dict[str, Any]) -> bool:
    """Whether the file is refused, or read like the complete file that transformers writes for it."""
    ours = read(fields)
    if ours is None:
        return True
    try:
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except KeyError:  # a rope_scaling beside rope_parameters that do not name kinds of layers, in Gemma 3
        return fields["model_type"] == "gemma3_text"
    if outer := fields.get("original_max_position_embeddings"):
        assert isinstance(outer, int)  # an attribute of the object, which then has priority when a model is made of it
        config.standardize_rope_params()
    return ours == read(config.to_dict())


@pytest.mark.parametrize("model_type", known_families())
def test_a_file_means_what_it_means_to_transformers(model_type: str) -> None:
    complete = raw(model_type)
    assert read(complete) is not None
    assert [fields for fields in SPELLINGS if not means_the_same_to_transformers(complete | fields)] == []


@pytest.mark.parametrize("model_type", known_families())
def test_an_absent_field_has_transformers_default_or_is_refused(model_type: str) -> None:
    complete = raw(
        model_type, num_attention_heads=32, hidden_size=256, vocab_size=300
    )  # 32: the default of many for the key heads
    wrong = []
    for name in complete.keys() - {"model_type"}:
        if not means_the_same_to_transformers({key: value for key, value in complete.items() if key != name}):
            wrong.append(name)
    assert wrong == []


UNUSED = {"_attn_implementation", "get_text_config", "initializer_range", "pad_token_id", "use_cache", "output_router_logits"}
"""What transformers' models ask of their configuration that changes no logits of a causal model."""
VISION = {"image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
"""Fields of Gemma 3's multimodal model, whose model_type is another."""
ENGINE = {
    *("cache_config", "model_config", "quant_config", "parallel_config", "eplb_config", "enable_eplb", "num_redundant_experts"),
    *("use_sequence_parallel_moe", "target_layer_count", "ada_rms_norm_t_cond", "ada_rms_norm_t_cond_dim"),
}
"""vLLM's own settings, and fields of its models for drafts and audio."""
OTHER = 7
"""A value that no field of `raw` has."""


SWITCHES: list[dict[str, Any]] = [
    {"output_router_logits": True},
    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 16},
    {"num_experts": None},
]
"""Fields that decide whether another one is read."""


@pytest.mark.parametrize("package", ["transformers", "vllm"])
@pytest.mark.parametrize("model_type", known_families())
def test_every_field_that_a_model_reads_is_read_or_refused(model_type: str, package: str) -> None:
    files = [raw(model_type) | switch for switch in SWITCHES]
    expected = [read(file) for file in files]
    names = set().union(*(fields_of(path) for path in sources(package, model_type)))
    assert {"hidden_size", "num_attention_heads"} <= names
    if expected[1] is None:  # a window is refused
        names -= {"sliding_window"}
    tried = names - UNUSED - VISION - ENGINE
    assert {name for name in tried if [read(file | {name: OTHER}) for file in files] == expected} == set()


def sources(package: str, model_type: str) -> Iterator[Path]:
    """The files that define the model in the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    root, name = Path(spec.submodule_search_locations[0]), model_type.removesuffix("_text")
    if package == "transformers":
        yield root / "models" / name / f"modeling_{name}.py"
        return
    yield root / "model_executor" / "models" / f"{name}.py"
    if name == "mistral":  # its layers are Llama's
        yield root / "model_executor" / "models" / "llama.py"


def fields_of(path: Path) -> set[str]:
    """The names in `config.NAME` and `getattr(config, "NAME", ...)`, also of `self.config` and `hf_config`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            target, name, *_ = node.args
            if _is_config(target) and isinstance(name, ast.Constant):
                names.add(str(name.value))
    return names


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("config", "hf_config")
