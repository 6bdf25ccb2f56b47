"""Creates everything that the three steps need from a seed: a tokenizer, an untrained model, and four data sets.

The task: answer a prompt of three letters with eight letters. Supervised training teaches only the form: any letters, few of them vowels.
Human judges (here: `rule.py`) prefer answers with more vowels; they compare two answers at a time and give no reasons. A reward model
learns from the comparisons, and PPO from the reward model.

Invariant: the same seed gives the same files, and no training file contains a held-out prompt: a prompt is held out when its CRC-32 is a
multiple of four.
"""

import argparse
import hashlib
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

from rule import VOWELS, reward

LENGTH = 8
VOWEL_SHARE = 0.12
"""Share of vowels in supervised answers. Each vowel is then rarer than each consonant, so that a greedy answer has none."""
COMPARED_SHARES = (0.0, 0.6)
"""Range of the share of vowels in the compared answers."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONSONANTS = "".join(letter for letter in LETTERS if letter not in VOWELS)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
VOCABULARY = {token: row for row, token in enumerate([*SPECIAL, *LETTERS, "="])}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}={%- endif -%}"
)
"""Renders `abc` as `abc=`, and with its answer as `abc=definilo<eos>`."""

Row = dict[str, str]


def prompt(rng: random.Random, held_out: bool) -> str:
    """Draws three letters, from the held-out prompts or from the others."""
    while True:
        text = "".join(rng.choices(LETTERS, k=3))
        if (zlib.crc32(text.encode()) % 4 == 0) == held_out:
            return text


def answer(rng: random.Random, share: float = VOWEL_SHARE) -> str:
    """Draws eight letters, each a vowel with the probability `share`."""
    return "".join(rng.choice(VOWELS if rng.random() < share else CONSONANTS) for _ in range(LENGTH))


def prompts(rng: random.Random, held_out: bool) -> Iterator[Row]:
    """Yields prompts, endlessly."""
    while True:
        yield {"prompt": prompt(rng, held_out)}


def answered(rng: random.Random, held_out: bool) -> Iterator[Row]:
    """Yields prompts with an answer, endlessly."""
    while True:
        yield {"prompt": prompt(rng, held_out), "response": answer(rng)}


def pairs(rng: random.Random, held_out: bool) -> Iterator[Row]:
    """Yields pairs of answers, the preferred one first, endlessly. Ties are drawn again."""
    while True:
        first, second = (answer(rng, rng.uniform(*COMPARED_SHARES)) for _ in range(2))
        if reward(first) != reward(second):
            chosen, rejected = sorted((first, second), key=reward, reverse=True)
            yield {"prompt": prompt(rng, held_out), "chosen": chosen, "rejected": rejected}


def write_rows(path: Path, rows: Iterator[Row], count: int) -> None:
    path.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(count)))


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=64,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int) -> None:
    """Saves a Qwen2 of 0.4M random parameters: two layers, four heads that share two key-value heads, tied embeddings."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    ids = {f"{name}_token_id": VOCABULARY[f"<{name}>"] for name in ("pad", "eos", "bos")}
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)


def prepare(out: Path, seed: int) -> bool:
    """Writes all files under `out`, the stamp last. Returns False if they already exist from the same recipe."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + str(seed).encode()).hexdigest()
    stamp = out / "prepared.txt"
    if stamp.exists() and stamp.read_text() == recipe:
        return False
    stamp.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows, count in (("prompts", prompts, 1024), ("answers", answered, 4096), ("pairs", pairs, 4096)):
        write_rows(out / f"{name}.jsonl", rows(random.Random(f"{seed}-{name}"), False), count)
        write_rows(out / f"{name}_held_out.jsonl", rows(random.Random(f"{seed}-{name}-held-out"), True), 256)
    save_model(out / "model", seed)
    save_tokenizer(out / "model")
    stamp.write_text(recipe)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the tokenizer, model and data of the three steps.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = prepare(arguments.out, arguments.seed)
    print(f"{'made' if made else 'already there:'} {arguments.out}")


if __name__ == "__main__":
    main()
