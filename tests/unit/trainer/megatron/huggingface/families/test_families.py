"""Values of config.json: sizes are read, and every missing, damaged or unsupported field is a ConfigError that names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import known_families, load_architecture, read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.rope import Rope
from support.configs import LLAMA

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "n_routed_experts": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}


def read(**changes: Any) -> Any:
    return read_architecture(HfConfig({**LLAMA, **changes}, "the file"))


@pytest.mark.parametrize("model_type", known_families())
def test_every_family_reads_its_sizes(model_type: str) -> None:
    experts = EXPERTS | ({"shared_expert_intermediate_size": 8} if model_type == "qwen2_moe" else {})
    experts |= {"partial_rotary_factor": 1} if model_type == "glm4_moe" else {}  # half of two features is no pair
    arch = read(model_type=model_type, head_dim=2, tie_word_embeddings=False, **experts)
    sizes = (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.ffn, arch.vocab, arch.max_position)
    assert arch.family.name == model_type
    assert sizes == (2, 8, 4, 2, 2, 8, 33, 16)
    assert arch.head == "untied"
    assert read(model_type=model_type, head_dim=2, tie_word_embeddings=True, **experts).head == "tied"


def test_an_absent_field_has_the_value_that_transformers_assumes() -> None:
    """A null is not absent: for the heads it means as many as query heads."""
    absent = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"num_attention_heads": 32}
    for model_type, expected in (("llama", 32), ("qwen2", 32), ("qwen3", 32)):
        fields = {**absent, "hidden_size": 128, "model_type": model_type}
        arch = read_architecture(HfConfig(fields))
        assert arch.kv_heads == expected == read_architecture(HfConfig({**fields, "num_key_value_heads": None})).kv_heads
    assert read(model_type="qwen3").head_dim == 128


def test_an_unknown_model_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        read(model_type="gpt2")
    assert all(name in caught.value.expected for name in known_families())
    assert "gpt2" in caught.value.found
    for module in ("base", "hf_config", "moe", "window", "os"):  # modules that are not families
        with pytest.raises(ConfigError):
            read(model_type=module)


def test_multi_head_latent_attention_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        read(model_type="deepseek_v3")
    assert all(name in caught.value.expected for name in known_families())
    assert "latent attention" in caught.value.found and "vLLM" in caught.value.found


@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("value", [None, "two", [], {}, 0, -1, 1.5, True, float("nan")])
def test_a_missing_or_damaged_field_is_named_with_its_file(name: str, value: Any) -> None:
    if (name, value) in (("rms_norm_eps", 1.5), ("num_key_value_heads", None)):  # a number; as many as heads
        return
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    if name == "model_type" and isinstance(value, str):
        return
    assert name in caught.value.expected and "the file" in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),  # vLLM's has none in its output projection
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 8}, "original_max_position_embeddings"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 2}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_model_that_would_run_differently_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert named in caught.value.expected


@pytest.mark.parametrize(
    ("flags", "biases"),
    [
        ({}, set()),
        ({"attention_bias": False, "mlp_bias": None}, set()),
        ({"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_layers_have_the_biases_that_the_file_switches_on(flags: dict[str, object], biases: set[str]) -> None:
    shapes = read(**flags).hf_shapes()
    found = {name.split(".")[-2]: shape for name, shape in shapes.items() if name.endswith(".bias")}
    assert found.keys() == biases
    assert all(shape == shapes[f"model.layers.1.{_module(name)}.weight"][:1] for name, shape in found.items())


def _module(projection: str) -> str:
    return f"{'self_attn' if projection[0] in 'qkvo' else 'mlp'}.{projection}"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[1]", b"null"])
def test_a_file_that_is_no_json_object_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_architecture(tmp_path)
    assert str(tmp_path) in caught.value.found
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_architecture(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.expected
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_architecture(tmp_path) == read()


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, Rope(1e4)),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(5e5, "linear", 2.0)),
        ({"rope_scaling": {**YARN, "attention_factor": 1.5}}, Rope(1e4, "yarn", 4.0, 4, 1.0, 32.0, True, 1.5)),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, Rope(1e4, "yarn", 4.0, 4, 1.0, 32.0, True, 1.0)),
    ],
)
def test_every_spelling_of_the_rotary_embedding_is_read(fields: dict[str, object], rope: Rope) -> None:
    assert read(**fields).rope == rope
