"""Sample data for each kind of reward.

A word of each prompt decides what is right, so a tiny model learns it within a minute; the other letters only make many prompts.

Invariant: equal calls return equal rows. A row has the columns `prompt` and `answer`, a supervised one `prompt` and `response`.
"""

import random
import string
from collections.abc import Callable, Iterable

Row = dict[str, str]
Example = Callable[[random.Random], tuple[Row, str]]
"""Makes a row, and a response in the form of an answer, which may be wrong."""

_TRIES = 20
_COLOURS = {"grass": "green", "snow": "white", "coal": "black", "blood": "red"}
_FLIES = {"gull": True, "mole": False, "hawk": True, "seal": False}
_KINDS = {"vowels": "aeiouy", "early": "abcdefgh", "late": "stuvwxyz"}


def _letters(rng: random.Random) -> tuple[Row, str]:
    kind = rng.choice(list(_KINDS))
    prompt = f"{kind} for {''.join(rng.choices(string.ascii_lowercase, k=3))}"
    return {"prompt": prompt, "answer": _KINDS[kind]}, "".join(rng.choices(string.ascii_lowercase, k=4))


def _colour(rng: random.Random) -> tuple[Row, str]:
    thing = rng.choice(list(_COLOURS))
    prompt = f"colour of {thing} {''.join(rng.choices(string.ascii_lowercase, k=3))}"
    return {"prompt": prompt, "answer": _COLOURS[thing]}, rng.choice(list(_COLOURS.values()))


def _one_more(rng: random.Random) -> tuple[Row, str]:
    number = rng.randrange(4)
    prompt = f"{number} {''.join(rng.choices(string.ascii_lowercase, k=3))} and 1 more"
    return {"prompt": prompt, "answer": str(number + 1)}, str(rng.randrange(4) + 1)


def _choice(rng: random.Random) -> tuple[Row, str]:
    animal = rng.choice(list(_FLIES))
    prompt = f"Can a {animal} fly? {''.join(rng.choices(string.ascii_lowercase, k=3))} A) yes B) no"
    return {"prompt": prompt, "answer": "A" if _FLIES[animal] else "B"}, rng.choice("AB")


EXAMPLES: dict[str, Example] = {"python": _letters, "exact": _colour, "numeric": _one_more, "math": _one_more, "choice": _choice}
"""The maker of rows for each reward."""


def rows(reward: str, count: int, seed: int, apart_from: Iterable[Row] = ()) -> list[Row]:
    """Prompts with labels. A prompt repeats, or is in `apart_from`, only if there are few prompts of its kind."""
    rng, found = random.Random(seed), list[Row]()
    seen = {row["prompt"] for row in apart_from}
    for _ in range(count):
        drawn = (EXAMPLES[reward](rng)[0] for _ in range(_TRIES))
        row = next((row for row in drawn if row["prompt"] not in seen), None) or EXAMPLES[reward](rng)[0]
        seen.add(row["prompt"])
        found.append(row)
    return found


def supervised_rows(reward: str, count: int, seed: int) -> list[Row]:
    """Prompts with responses that have the form of an answer, for a model that cannot write one yet."""
    rng = random.Random(seed)
    found = (EXAMPLES[reward](rng) for _ in range(count))
    return [{"prompt": row["prompt"], "response": response} for row, response in found]
