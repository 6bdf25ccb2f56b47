"""config.json of published models, from their model cards, and their published parameter counts."""

import json
from pathlib import Path
from typing import Any

from support.tiny_tokenizer import model_files

_QWEN = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}
_QWEN2 = {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": {
        **_QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-32B": {
        **_QWEN2,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B-A22B": {
        **_QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def published_config(name: str, directory: Path) -> Path:
    """Writes the model's config.json into `directory` and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    return directory


def published_model(name: str, directory: Path) -> Path:
    """A directory like the published model's, with a small tokenizer. The weights are a sparse file without disk or memory use."""
    directory.mkdir(parents=True)
    for file, content in model_files().items():
        (directory / file).write_bytes(content)
    size = 2 * PARAMETERS[name]
    header = json.dumps({"weights": {"dtype": "BF16", "shape": [PARAMETERS[name]], "data_offsets": [0, size]}}).encode()
    with open(directory / "model.safetensors", "wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + size)
    return published_config(name, directory)
