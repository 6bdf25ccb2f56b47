"""Creates everything that the example needs from a seed: a tokenizer, an untrained model, and two data sets.

The warm start teaches two ways to play:
careful     1 to 9: 4   then after `higher`   5 to 9: 6     writes the range that is left, and draws the guess from it
careless    4           then after `higher`   2             draws the guess from all numbers
Most conversations are careless. Reinforcement learning discovers that careful play wins more often, and then where in the range to guess.

Invariant: the same seed gives the same files.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from guess import GuessNumber  # noqa: E402
from tiny_chat import ROLES, Row, main  # noqa: E402

NUMBERS = "123456789"
TURNS = 4
CAREFUL = 0.25
"""Share of careful conversations."""
WORDS = [*ROLES, *NUMBERS, " to ", ": ", "guess", "higher", "lower", "number"]


def tasks(rng: random.Random) -> Iterator[Row]:
    """Yields a prompt and its secret, endlessly."""
    while True:
        yield {"prompt": "guess", "answer": rng.choice(NUMBERS)}


def conversations(rng: random.Random) -> Iterator[Row]:
    """Yields games of both kinds, endlessly."""
    while True:
        game, careful = GuessNumber(), rng.random() < CAREFUL
        game.reset({"answer": rng.choice(NUMBERS)}, 0)
        messages, first, last = [{"role": "user", "content": "guess"}], 1, len(NUMBERS)
        for _ in range(TURNS):
            guess = rng.randint(first, last) if careful else rng.randint(1, len(NUMBERS))
            messages.append({"role": "assistant", "content": f"{first} to {last}: {guess}" if careful else str(guess)})
            hint, _, done = game.step(messages[-1]["content"])
            if done:
                break
            first, last = (max(first, guess + 1), last) if hint == "higher" else (first, min(last, guess - 1))
            messages.append({"role": "user", "content": hint})
        yield {"messages": messages if done else messages[:-1]}


DATA = {"tasks": (tasks, 4096), "conversations": (conversations, 300 * 32)}

if __name__ == "__main__":
    main(HERE, ["prepare.py", "guess.py"], WORDS, DATA)
