"""The files of a character-level tokenizer, created in memory: the model files of a run record."""

import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<system>"]
CHARS = list("0123456789+=,# abcdefghijklmnopqrstuvwxyz")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def vocabulary() -> dict[str, int]:
    """Id of every token."""
    return {token: i for i, token in enumerate(SPECIAL + CHARS)}


@cache
def _tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str().encode()


def model_files(
    chat_template: str | None = CHAT_TEMPLATE, eos: str | None = "<eos>", generation_eos: Any = None
) -> dict[str, bytes]:
    """A model directory's small files by name. 48 ids: 7 special ones, then one per character."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", "eos_token": eos}
    files = {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": generation_eos}).encode(),
        "config.json": json.dumps({"model_type": "qwen2", "vocab_size": len(SPECIAL) + len(CHARS), **SIZES}).encode(),
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return files
