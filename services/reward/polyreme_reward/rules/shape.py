"""The form of a response: tags, length, repetition. Invariant: no label is needed, and the time is linear."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from polyreme_reward.items import Item

LengthUnit = Literal["characters", "words"]


def think_format(think: str = "think", answer: str | None = "answer", prefilled: bool = False) -> Callable[[Item], float]:
    """1 if the response is <think>...</think><answer>...</answer> and nothing else, no tag twice, the answer not empty; else 0.

    Args:
        think: name of the first pair of tags.
        answer: name of the second; null: whatever follows the first pair is the answer.
        prefilled: the prompt already ends with the opening <think>, so that the response lacks it.
    """

    def score(item: Item) -> float:
        text = f"<{think}>" * prefilled + item.response.strip()
        thought = _only(text, think)
        if thought is None or thought[0].strip():
            return 0.0
        rest = thought[2]
        if answer is not None:
            final = _only(rest, answer)
            if final is None or final[0].strip() or final[2].strip():
                return 0.0
            rest = final[1]
        return 1.0 if rest.strip() else 0.0

    return score


def tagged(text: str, *names: str) -> bool:
    """Whether the text has each pair of tags exactly once, in this order."""
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    places = [text.find(tag) for tag in tags]
    return all(text.count(tag) == 1 for tag in tags) and places == sorted(places)


def length(unit: LengthUnit = "words") -> Callable[[Item], float]:
    """The length of the response. Give it a small negative weight to price every word.

    Args:
        unit: what is counted.
    """
    return lambda item: float(_count(item.response, unit))


def overlong(
    limit: Annotated[int, Field(ge=1)], margin: Annotated[int, Field(ge=1)], unit: LengthUnit = "words"
) -> Callable[[Item], float]:
    """0 up to limit - margin, falling linearly to -1 at the limit, and -1 beyond it (soft overlong punishment of DAPO).

    Args:
        limit: the length at which the punishment is whole.
        margin: over how much it grows.
        unit: what is counted.
    """
    return lambda item: -min(max((_count(item.response, unit) - (limit - margin)) / margin, 0.0), 1.0)


def repetition(size: Annotated[int, Field(ge=1, le=100)] = 3) -> Callable[[Item], float]:
    """Minus the share of the response's word n-grams that occurred before: 0 for none, near -1 for one phrase over and over.

    Args:
        size: words in an n-gram. A response with fewer scores 0.
    """

    def score(item: Item) -> float:
        words = item.response.split()
        grams = len(words) - size + 1
        if grams < 1:
            return 0.0
        return len(set(zip(*(words[start:] for start in range(size)), strict=False))) / grams - 1.0

    return score


def _count(text: str, unit: LengthUnit) -> int:
    return len(text) if unit == "characters" else len(text.split())


def _only(text: str, name: str) -> tuple[str, str, str] | None:
    """What stands before, in and behind the only <name>...</name>; None unless there is exactly one of each tag, in order."""
    if not tagged(text, name):
        return None
    before, _, rest = text.partition(f"<{name}>")
    inside, _, behind = rest.partition(f"</{name}>")
    return before, inside, behind
