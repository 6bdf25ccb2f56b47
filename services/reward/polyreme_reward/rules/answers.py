"""Compares answers with the label as text and as numbers.

Invariant: the time is linear in the text, and a missing label is an error, not a score of 0.
"""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import quantity
from polyreme_reward.rules.quantity import Quantity
from polyreme_reward.rules.response import ASIDE, answer_text, between, marked, required_label
from polyreme_reward.rules.spelling import plain, readable

_QUOTED = re.compile(
    r"\s*(?:\[\s*)?(?:\"([^\",\[\]]*)\"|'([^',\[\]]*)'|(?<=\[)([^\",\[\]]*))\s*(?:\])?\s*"
)  # a text or a list of one in JSON
_LIST = re.compile(r"(?!\s*([-+$\d.]+)(?:\s*[,;]\s*\1)+\s*\Z)[-+$\d.\s]+(?:[,;][-+$\d.\s]+)+")  # of several values
_ONE_LINE = 200  # maximum characters of an answer that is read as one number, and of a remark in brackets behind it


def exact(after: str | None = None, before: str | None = None, ignore_case: bool = False) -> Callable[[Item], float]:
    """1 if the response equals the label without leading and trailing white space, else 0.

    Texts that look alike are equal: Unicode's composed and decomposed letters, spaces, line ends, and invisible characters.

    Args:
        after: compare only the text after the first occurrence of this marker. A response without it scores 0.
        before: compare only the text before the next occurrence of this marker. A response without it scores 0.
        ignore_case: ignore upper and lower case.
    """

    def score(item: Item) -> float:
        label = readable(required_label(item)).strip()
        answer = between(item.response, after, before)
        if answer is None:
            return 0.0
        answer = readable(answer).strip()
        if ignore_case:
            answer, label = answer.casefold(), label.casefold()
        return 1.0 if answer == label else 0.0

    return score


def numeric(after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the number in the response equals the label's (GSM8K), else 0.

    The number is the last one in the last \boxed{...}; without a box, the last one after the last "####" or "answer is";
    otherwise the last one in the response. A later correction ("no, 42") replaces it. Text in <think>...</think> does not count.
    Values are compared exactly: 1,234.50 equals 1234.5, 12 500 equals 12500, 1e-05 equals 0.00001, 50 mm equals 5 cm. Dates,
    times, ranges and powers are not numbers. The label must be one number, optionally after "####" or "=". Every other label is
    an error, including a fraction, which the reward `math` compares.

    Args:
        after: search only after the first occurrence of this marker. A response without it scores 0.
        before: search only before the next occurrence of this marker. A response without it scores 0.
    """

    def score(item: Item) -> float:
        expected = _gold(required_label(item))
        text = answer_text(item, after, before)
        number = None if text is None else _number(text)
        return 1.0 if number is not None and expected.equals(number) else 0.0

    return score


def _gold(label: str) -> Quantity:
    named = marked(label)
    text = label if named is None else named
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[1] or quoted[2] or quoted[3] or ""
    found = quantity.read(plain(text))
    if found is None:
        raise RewardError(f"expected one number in the label; found {label[:200]!r}")
    if found.fraction:
        raise RewardError(f"expected a number in the label; found the fraction {label[:200]!r}, which the reward `math` compares")
    return found


def _number(text: str) -> Quantity | None:
    text = text if (named := marked(text)) is None else named
    whole = quantity.read(plain(text)) if len(text) < _ONE_LINE else None  # x = 3 1/2 cups
    if whole is None and named is not None and _LIST.fullmatch(plain(named)):
        return None
    return whole or quantity.last_in(text[:-_ONE_LINE] + ASIDE.sub("", text[-_ONE_LINE:]))[0]
