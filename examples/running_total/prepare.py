"""Creates everything that the running-total demo needs from a seed: a tokenizer, an untrained model, and four data sets.

The task: given labelled digits such as `a5b8c3d9`, answer with their sum modulo 10 after a `#`. The supervised data teaches two ways to
answer:
careful    b8+5=3,c3+3=6,d9+6=5#5     writes every partial sum; nearly always right
shortcut   #7                         guesses; right one time in ten
The supervised mixture mostly takes the shortcut. Reinforcement learning discovers that careful answers score higher.

Invariant: the same seed gives the same files, and no held-out prompt is ever trained on: a prompt is held out when its CRC-32 is
a multiple of four.
"""

import argparse
import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LONGEST = 16
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
VOCABULARY = {token: row for row, token in enumerate([*SPECIAL, *"0123456789+=,# abcdefghijklmnopqrstuvwxyz"])}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}={%- endif -%}"
)
"""Renders `a5b8` as `a5b8=`, and with its answer as `a5b8=b8+5=3#3<eos>`."""

MIXTURE_CAREFUL = {2: 0.70, 3: 0.38}
"""Share of careful answers in the mixture, by the number of digits. Well above a half for two digits and well below for three, so
that a greedy answer after the warm start is careful for two digits and a guess beyond: about 0.24 + 0.76 / 10 of them are right."""
MIXTURE_DECAY = 0.70
"""Each digit beyond three multiplies the share by this, down to MIXTURE_FLOOR."""
MIXTURE_FLOOR = 0.05
MIXTURE_SLIPS = 0.1
"""Share of the mixture's careful answers with one wrong addition."""

Row = dict[str, str]
CountDrawer = Callable[[random.Random], int]


def task_count(rng: random.Random) -> int:
    """Draws the number of digits of a prompt, 2 to 16: mostly small (geometric), and 14 to 16 for 8%."""
    if rng.random() < 0.08:
        return rng.randint(14, LONGEST)
    return _geometric(rng, 0.74, LONGEST)


def short_count(rng: random.Random) -> int:
    """Draws 2 to 8 digits, mostly few."""
    return _geometric(rng, 0.6, 8)


def even_count(rng: random.Random) -> int:
    """Draws 2 to 16 digits, uniformly."""
    return rng.randint(2, LONGEST)


def draw_digits(
    rng: random.Random, held_out: bool, draw_count: CountDrawer = task_count, first: int = 0
) -> tuple[list[int], str]:
    """Draws digits and returns them with their prompt, whose labels start at letter number `first` of the alphabet (`a` in the task)."""
    while True:
        count = draw_count(rng)
        digits = [rng.randrange(10) for _ in range(count)]
        prompt = "".join(label + str(digit) for label, digit in zip(_labels(count, first), digits, strict=True))
        if (zlib.crc32(prompt.encode()) % 4 == 0) == held_out:
            return digits, prompt


def careful_answer(digits: list[int], slip_at: int | None = None, slip_by: int = 0, first: int = 0) -> str:
    """Returns every partial sum, then the result. From addition number `slip_at` on, the sum is wrong by `slip_by`."""
    total = digits[0]
    steps = []
    for place, (label, digit) in enumerate(zip(_labels(len(digits), first)[1:], digits[1:], strict=True), start=1):
        new = (total + digit + (slip_by if place == slip_at else 0)) % 10
        steps.append(f"{label}{digit}+{total}={new}")
        total = new
    return ",".join(steps) + f"#{total}"


def mixed_answer(digits: list[int], rng: random.Random) -> str:
    """Returns an answer of the mixture: sometimes careful, less often for long sums, otherwise a random guess."""
    share = MIXTURE_CAREFUL.get(len(digits)) or max(MIXTURE_FLOOR, MIXTURE_CAREFUL[3] * MIXTURE_DECAY ** (len(digits) - 3))
    if rng.random() >= share:
        return f"#{rng.randrange(10)}"
    if rng.random() < MIXTURE_SLIPS:
        return careful_answer(digits, rng.randint(1, len(digits) - 1), rng.randint(1, 9))
    return careful_answer(digits)


def prompts(rng: random.Random, held_out: bool) -> Iterator[Row]:
    """Yields prompts with their right answers, endlessly."""
    while True:
        digits, prompt = draw_digits(rng, held_out)
        yield {"prompt": prompt, "answer": str(sum(digits) % 10)}


def short_sums(rng: random.Random) -> Iterator[Row]:
    """Yields careful sums of 2 to 8 digits, mostly few, endlessly. The model learns addition several times faster on these."""
    while True:
        digits, prompt = draw_digits(rng, held_out=False, draw_count=short_count)
        yield {"prompt": prompt, "response": careful_answer(digits)}


def careful_sums(rng: random.Random) -> Iterator[Row]:
    """Yields careful sums of 2 to 16 digits, endlessly. Every other one is a short sum with later labels, which would otherwise be rare."""
    while True:
        digits, prompt = draw_digits(rng, held_out=False, draw_count=even_count)
        yield {"prompt": prompt, "response": careful_answer(digits)}
        count = rng.randint(2, 8)
        first = rng.randint(0, LONGEST - count)
        digits, prompt = draw_digits(rng, False, lambda _, count=count: count, first)
        yield {"prompt": prompt, "response": careful_answer(digits, first=first)}


def mixed_sums(rng: random.Random) -> Iterator[Row]:
    """Yields prompts of the task with the mixture's answers, endlessly."""
    while True:
        digits, prompt = draw_digits(rng, held_out=False)
        yield {"prompt": prompt, "response": mixed_answer(digits, rng)}


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
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int) -> None:
    """Saves a Qwen2 of 0.8M random parameters: four layers, four heads that share two key-value heads, tied embeddings."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    ids: dict[str, Any] = {
        "pad_token_id": VOCABULARY["<pad>"],
        "eos_token_id": VOCABULARY["<eos>"],
        "bos_token_id": VOCABULARY["<bos>"],
    }
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        use_sliding_window=False,
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
    write_rows(out / "train.jsonl", prompts(random.Random(f"{seed}-train"), held_out=False), 8192)
    write_rows(out / "eval.jsonl", prompts(random.Random(f"{seed}-eval"), held_out=True), 500)
    for name, sums, count in (
        ("short", short_sums, 240 * 48),
        ("careful", careful_sums, 240 * 36),
        ("mixed", mixed_sums, 100 * 96),
    ):
        write_rows(out / f"sft_{name}.jsonl", sums(random.Random(f"{seed}-{name}")), count)
    save_model(out / "model", seed)
    save_tokenizer(out / "model")
    stamp.write_text(recipe)
    return True


def _geometric(rng: random.Random, ratio: float, most: int) -> int:
    """Draws 2, 3, ... up to `most`, each `ratio` times as likely as the previous number."""
    while True:
        count = 2
        while rng.random() < ratio:
            count += 1
        if count <= most:
            return count


def _labels(count: int, first: int = 0) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[first : first + count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the tokenizer, model and data of the running-total demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = prepare(arguments.out, arguments.seed)
    print(f"{'made' if made else 'already there:'} {arguments.out}")


if __name__ == "__main__":
    main()
