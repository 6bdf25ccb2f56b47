"""Creates what the example needs from a seed: a tiny model with random weights, the tasks, and games to begin with.

Invariant: the same seed gives the same files.
"""

import argparse
import json
import random
from pathlib import Path

from agent import GUESSES

from polyreme.cli.new_run.tiny_model import write_tiny_model

LETTERS = "abcdefg"
MIXED = 0.25
"""Share of the mixed games whose player heeds the hints. The others guess any letter."""


def game(rng: random.Random, heeded: float) -> list[dict[str, str]]:
    """A game of the warm start: each guess is drawn from the letters that the hints leave, or, by 1 - `heeded`, from all letters."""
    secret, first, last, heeds = rng.randrange(len(LETTERS)), 0, len(LETTERS) - 1, rng.random() < heeded
    messages = [{"role": "user", "content": "guess"}]
    for _ in range(GUESSES):
        guess = rng.randint(first, last) if heeds else rng.randrange(len(LETTERS))
        messages.append({"role": "assistant", "content": LETTERS[guess]})
        if guess == secret:
            break
        messages.append({"role": "user", "content": ">" if guess < secret else "<"})
        first, last = (max(first, guess + 1), last) if guess < secret else (first, min(last, guess - 1))
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def prepare(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    if not (out / "model").exists():
        write_tiny_model(out / "model")
    tasks = [{"prompt": f"find {letter}", "answer": letter} for letter in LETTERS]
    heeded, mixed = ([{"messages": game(rng, share)} for _ in range(count)] for share, count in ((1.0, 9600), (MIXED, 1920)))
    for name, rows in (("tasks", tasks), ("heeded", heeded), ("mixed", mixed)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
    print(f"made {arguments.out}")


if __name__ == "__main__":
    main()
