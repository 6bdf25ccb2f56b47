"""Creates what the example needs from a seed: a tiny model with random weights, orders, and conversations to begin with.

Invariant: the same seed gives the same files.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from polyreme.cli.new_run.tiny_model import write_tiny_model

DISHES = "abcdefgh"
COUNT = 3
RIGHT = 0.3
"""Share of right bills in the mixed conversations. The other ones have any dishes."""


def order(rng: random.Random) -> str:
    return "".join(rng.choices(DISHES, k=COUNT))


def orders(rng: random.Random) -> Iterator[dict[str, str]]:
    """Every order once, in any order."""
    every = [a + b + c for a in DISHES for b in DISHES for c in DISHES]
    yield from ({"prompt": f"order {each}", "answer": each} for each in rng.sample(every, len(every)))


def conversations(rng: random.Random, count: int, right: float) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Conversations of the warm start. `right`: share of right bills."""
    for _ in range(count):
        ordered = order(rng)
        bill = ordered if rng.random() < right else order(rng)
        turns = [*((dish, "ok") for dish in ordered), ("bill", bill)]
        roles = ("user", "assistant")
        yield {"messages": [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]}


def prepare(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    if not (out / "model").exists():
        write_tiny_model(out / "model")
    files = {"orders": orders(rng), "right": conversations(rng, 6400, 1.0), "mixed": conversations(rng, 1920, RIGHT)}
    for name, rows in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the model and the data of the example.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
    print(f"made {arguments.out}")


if __name__ == "__main__":
    main()
