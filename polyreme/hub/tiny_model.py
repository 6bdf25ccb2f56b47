"""A tiny model with random weights, to try a run without another model.

Invariant: the files are those of a Hugging Face directory of a Llama with a character tokenizer, and the same call writes the
same bytes. Only NumPy is needed.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = ["\n", *map(chr, range(32, 127))]
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _CONTEXT = 128, 256, 2, 4, 2, 256
_SCALE = 0.02
"""Standard deviation of the weights, as in transformers."""
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}={%- endif -%}"
)
"""The prompt, then "=", then the answer and the end token."""


def write_tiny_model(folder: Path) -> None:
    """Creates the folder with config.json, tokenizer files, chat template and weights."""
    folder.mkdir(parents=True)
    texts = {
        "config.json": _config(),
        "generation_config.json": {"eos_token_id": 1, "pad_token_id": 0},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "model_max_length": _CONTEXT,
        },
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "model.safetensors").write_bytes(_safetensors(_weights()))


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_vocabulary()),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": _CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def _vocabulary() -> dict[str, int]:
    return {token: number for number, token in enumerate([*_SPECIAL, *_CHARACTERS])}


def _tokenizer() -> dict[str, object]:
    """tokenizer.json: one token per character."""
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **marks} for number, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": _vocabulary(), "unk_token": "<unk>"},
    }


def _weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * _SCALE).astype(np.float32)

    norm, kv = np.ones(_HIDDEN, dtype=np.float32), _HIDDEN // _HEADS * _KV_HEADS
    weights = {"model.embed_tokens.weight": matrix(len(_vocabulary()), _HIDDEN)}
    for layer in range(_LAYERS):
        tensors = {
            "self_attn.q_proj": matrix(_HIDDEN, _HIDDEN),
            "self_attn.k_proj": matrix(kv, _HIDDEN),
            "self_attn.v_proj": matrix(kv, _HIDDEN),
            "self_attn.o_proj": matrix(_HIDDEN, _HIDDEN),
            "mlp.gate_proj": matrix(_INNER, _HIDDEN),
            "mlp.up_proj": matrix(_INNER, _HIDDEN),
            "mlp.down_proj": matrix(_HIDDEN, _INNER),
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
        }
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}
    return weights | {"model.norm.weight": norm, "lm_head.weight": matrix(len(_vocabulary()), _HIDDEN)}


def _safetensors(weights: Mapping[str, NDArray[np.float32]]) -> bytes:
    """The tensors in the safetensors format: length of the header, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in weights.items():
        start = len(data)
        data += tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)
