"""Answers compared with the label as text or as numbers. Invariant: linear time, and no label is an error, not a zero."""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError

_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def exact(after: str | None = None, ignore_case: bool = False) -> Callable[[Item], float]:
    """1 if the response equals the label, white space around both left out; else 0.

    Args:
        after: compare only what follows the first occurrence of this text in the response; a response without it scores 0.
        ignore_case: compare without regard to case.
    """

    def score(item: Item) -> float:
        label = required_label(item).strip()
        answer = behind(item.response, after)
        if answer is None:
            return 0.0
        answer = answer.strip()
        if ignore_case:
            answer, label = answer.casefold(), label.casefold()
        return 1.0 if answer == label else 0.0

    return score


def numeric(after: str | None = None) -> Callable[[Item], float]:
    """1 if the last number in the response equals the last number in the label (GSM8K); else 0.

    1,234.50 equals 1234.5 and 007 equals 7: numbers are compared by value, exactly, however long.

    Args:
        after: look only behind the first occurrence of this text in the response; a response without it scores 0.
    """

    def score(item: Item) -> float:
        expected = last_number(required_label(item))
        if expected is None:
            raise RewardError(f"expected a number in the label; found {item.label[:200]!r}")
        answer = behind(item.response, after)
        return 1.0 if answer is not None and last_number(answer) == expected else 0.0

    return score


def required_label(item: Item) -> str:
    if not item.label:
        raise RewardError("expected a label to compare with; found none. Give every row one (data.label_key)")
    return item.label


def behind(text: str, marker: str | None) -> str | None:
    """What follows the first marker; None when there is no marker in the text."""
    if marker is None:
        return text
    _, found, rest = text.partition(marker)
    return rest if found else None


def last_number(text: str) -> str | None:
    """The last number in the text in a canonical spelling, so that equal numbers are equal strings; None without one."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _canonical(last.group())


def _canonical(number: str) -> str:
    if "," in number and not _GROUPED.fullmatch(number):
        number = number.rstrip(",").rpartition(",")[2]  # a list of numbers, not one with thousands separators
    sign = "-" if number.startswith("-") else ""
    whole, _, fraction = number.lstrip("-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value
