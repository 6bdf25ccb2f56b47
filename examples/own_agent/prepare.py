"""Creates what the example needs from a seed: a tiny model with random weights, tasks, and conversations to begin with.

Invariant: the same seed gives the same files.
"""

import argparse
import json
import random
from pathlib import Path

from agent import DRAFTS, LENGTH

from polyreme.hub.tiny_model import write_tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def task(rng: random.Random) -> dict[str, str]:
    return {"prompt": f"a word for {''.join(rng.choices(LETTERS, k=3))}"}


def conversation(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """One to three drafts of any letters, as the agent asks for them."""
    messages = [{"role": "user", "content": task(rng)["prompt"]}]
    for draft in range(rng.randint(1, DRAFTS)):
        word = "".join(rng.choices(LETTERS, k=LENGTH))
        if draft:
            messages.append({"role": "user", "content": f"only {sum(letter in 'aeiou' for letter in messages[-1]['content'])}"})
        messages.append({"role": "assistant", "content": word})
    return {"messages": messages}


def prepare(out: Path, seed: int) -> None:
    rng = random.Random(seed)
    if not (out / "model").exists():
        write_tiny_model(out / "model")
    files = {"tasks": [task(rng) for _ in range(512)], "conversations": [conversation(rng) for _ in range(2560)]}
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
