"""Scores the form of a response: tags, length, repetition.

Invariant: no rule needs a label, and the time is linear in the text.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from polyreme_reward.items import Item

LengthUnit = Literal["characters", "words"]


def think_format(think: str = "think", answer: str | None = "answer", prefilled: bool = False) -> Callable[[Item], float]:
    """1 if the response is exactly <think>...</think><answer>...</answer> with each tag once and a non-empty answer, else 0.

    Args:
        think: name of the first pair of tags.
        answer: name of the second pair. null: the text after the first pair is the answer.
        prefilled: the prompt ends with the opening <think>, so the response does not contain it.
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
    """The length of the response. A small negative weight penalises every word.

    Args:
        unit: unit of the length.
    """
    return lambda item: float(_count(item.response, unit))


def overlong(
    limit: Annotated[int, Field(ge=1)], margin: Annotated[int, Field(ge=1)], unit: LengthUnit = "words"
) -> Callable[[Item], float]:
    """0 up to limit - margin, then linear down to -1 at the limit, and -1 beyond it (DAPO's soft overlong punishment).

    Args:
        limit: length from which the punishment is -1.
        margin: length over which the punishment grows.
        unit: unit of the length.
    """
    return lambda item: -min(max((_count(item.response, unit) - (limit - margin)) / margin, 0.0), 1.0)


def repetition(size: Annotated[int, Field(ge=1, le=100)] = 3) -> Callable[[Item], float]:
    """Minus the fraction of the response's word n-grams that are repetitions: 0 for none, near -1 for one repeated phrase.

    Args:
        size: words per n-gram. A shorter response scores 0.
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
    """The texts before, in and after the only <name>...</name>, or None unless each tag occurs exactly once, in order."""
    if not tagged(text, name):
        return None
    before, _, rest = text.partition(f"<{name}>")
    inside, _, behind = rest.partition(f"</{name}>")
    return before, inside, behind
