"""The files of a first run with an environment: the class in guess_number.py, its section of run.yaml, and its data.

Halving the range always finds the number in TURNS guesses. The warm start teaches half-careful play, which misses it often.

Invariant: the same call returns the same rows. A row has the columns `prompt` and `answer`; a supervised row has `messages`.
"""

import inspect
import random

from polyreme.cli.new_run import guess_number

TURNS = 2
SECTION = f"""\
reward: null                      # the environment gives the rewards

environment:
  file: environment.py
  max_turns: {TURNS}                    # answers of the policy in an episode
  correctness: true               # a reward of 1 is a success, 0 a failure
"""
"""The sections `reward` and `environment` of run.yaml."""
_NUMBERS = range(1, 4)
"""As many as TURNS guesses find for certain."""
_PROMPT = f"Guess {_NUMBERS[0]} to {_NUMBERS[-1]}."
_CAREFUL = 0.5
"""Share of the warm start's guesses that heed all hints. Reinforcement learning discovers that they win, and where to begin."""


def source() -> str:
    """The text of environment.py."""
    return inspect.getsource(guess_number)


def tasks(count: int, seed: int) -> list[dict[str, str]]:
    """Prompts with their secrets, each number about as often as the others."""
    secrets = [_NUMBERS[index % len(_NUMBERS)] for index in range(count)]
    random.Random(seed).shuffle(secrets)
    return [{"prompt": _PROMPT, "answer": str(secret)} for secret in secrets]


def conversations(count: int, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Episodes for a model that cannot write a guess yet."""
    rng = random.Random(seed)
    return [{"messages": _episode(row, rng)} for row in tasks(count, seed)]


def _episode(row: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    game = guess_number.GuessNumber()
    game.reset(row)
    messages, first, last = [{"role": "user", "content": row["prompt"]}], _NUMBERS[0], _NUMBERS[-1]
    for turn in range(TURNS):
        guess = rng.randint(first, last) if rng.random() < _CAREFUL else rng.choice(_NUMBERS)
        messages.append({"role": "assistant", "content": str(guess)})
        hint, _, done = game.step(str(guess))
        if done or turn == TURNS - 1:
            break
        first, last = (max(first, guess + 1), last) if hint == "higher" else (first, min(last, guess - 1))
        messages.append({"role": "user", "content": str(hint)})
    return messages
