"""Creates what the example needs from a seed: a tiny model with random weights, prompts for the checks, and conversations to begin with.

Invariant: the same seed gives the same files.
"""

import argparse
import json
import random
from pathlib import Path

from product import LENGTH, LETTERS

from polyreme.hub.tiny_model import write_tiny_model


def prepare(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    if not (out / "model").exists():
        write_tiny_model(out / "model")
    prompts = [{"prompt": f"a word for {one}{two}"} for one in LETTERS[:3] for two in LETTERS[:3]]
    words = [{**rng.choice(prompts), "response": "".join(rng.choices(LETTERS, k=LENGTH))} for _ in range(2560)]
    for name, rows in (("prompts", prompts), ("words", words)):
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
