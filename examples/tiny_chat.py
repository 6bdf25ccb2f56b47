"""A tiny chat model from a seed, for the examples with an environment: a tokenizer of whole words, a chat template, random weights.

Invariant: the same words and seed give the same files.
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\n' }}"
    "{%- for tool in tools -%}{{ tool.function.name + ': ' + tool.function.description }}{%- endfor -%}"
    "{{ '<|im_end|>' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}"""
    "{%- endfor -%}"
    "{{ '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Each message between <|im_start|> and <|im_end|>, with its role; tools and calls in the manner of Qwen, but with little text."""
ROLES = ["system\n", "user\n", "assistant\n", "tool\n"]

Row = dict[str, Any]
Rows = Callable[[random.Random], Iterator[Row]]


def main(here: Path, sources: Sequence[str], words: Sequence[str], data: Mapping[str, tuple[Rows, int]]) -> None:
    """The command line of an example's prepare.py: writes its model and data unless they are there from the same recipe.

    Args:
        here: the example's folder.
        sources: its files that determine the data.
        words: the tokenizer's.
        data: by name, what yields the rows of a data set, and their number.
    """
    parser = argparse.ArgumentParser(description=f"Create the tokenizer, model and data of {here.name}.")
    parser.add_argument("--out", type=Path, default=here / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out, seed, stamp = arguments.out, arguments.seed, arguments.out / "prepared.txt"
    contents = b"".join(path.read_bytes() for path in (*(here / name for name in sources), Path(__file__)))
    recipe = hashlib.sha256(contents + str(seed).encode()).hexdigest()
    is_there = stamp.exists() and stamp.read_text() == recipe
    if not is_there:
        stamp.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        for name, (rows, count) in data.items():
            write_rows(out / f"{name}.jsonl", rows(random.Random(f"{seed}-{name}")), count)
        save(out / "model", words, seed)
        stamp.write_text(recipe)
    print(f"{'already there:' if is_there else 'made'} {out}")


def write_rows(path: Path, rows: Iterator[Row], count: int) -> None:
    path.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)))


def save(folder: Path, words: Sequence[str], seed: int) -> None:
    """Saves a tokenizer with these words, and an untrained model for it."""
    save_model(folder, len(SPECIAL) + len(words), seed)
    save_tokenizer(folder, words)


def save_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Saves a tokenizer with one token for each word; the longest word that fits is taken."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: row for row, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{alternatives}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, vocabulary: int, seed: int) -> None:
    """Saves a Qwen2 of 0.4M random parameters: two layers, four heads that share two key-value heads, tied embeddings."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
