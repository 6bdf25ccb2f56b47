"""Answers compared with the label: as text, as numbers, as choices. Invariant: linear time, and no label is an error, not a zero."""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError

_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WORD = re.compile(r"[^\W_]+")
_PRONOUN = re.compile(r"I(?:['\u2019]|\s+[a-z])")
_WINDOW = 100  # characters behind "answer" in which the choice must stand


def exact(after: str | None = None, before: str | None = None, ignore_case: bool = False) -> Callable[[Item], float]:
    """1 if the response equals the label, white space around both left out; else 0.

    Args:
        after: compare only what follows the first occurrence of this text in the response; a response without it scores 0.
        before: compare only what precedes the first occurrence of this text after that; a response without it scores 0.
        ignore_case: compare without regard to case.
    """

    def score(item: Item) -> float:
        label = required_label(item).strip()
        answer = between(item.response, after, before)
        if answer is None:
            return 0.0
        answer = answer.strip()
        if ignore_case:
            answer, label = answer.casefold(), label.casefold()
        return 1.0 if answer == label else 0.0

    return score


def numeric(after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    """1 if the last number in the response equals the last number in the label (GSM8K); else 0.

    1,234.50 equals 1234.5 and 007 equals 7: numbers are compared by value, exactly, however long.

    Args:
        after: look only behind the first occurrence of this text in the response; a response without it scores 0.
        before: look only before the first occurrence of this text after that; a response without it scores 0.
    """

    def score(item: Item) -> float:
        expected = last_number(required_label(item))
        if expected is None:
            raise RewardError(f"expected a number in the label; found {item.label[:200]!r}")
        answer = between(item.response, after, before)
        return 1.0 if answer is not None and last_number(answer) == expected else 0.0

    return score


def choice(letters: str = "ABCDEFGHIJ", after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the response chooses the label's letter (multiple choice); else 0.

    The choice is the letter in the last \boxed{...}; without one, the first letter behind the last "answer" or "Answer:", where the I
    of "I think" counts only when no other letter follows; without that, a response that is the letter alone, however bracketed.

    Args:
        letters: what may be chosen, in capitals.
        after: look only behind the first occurrence of this text in the response; a response without it scores 0.
        before: look only before the first occurrence of this text after that; a response without it scores 0.
    """

    def score(item: Item) -> float:
        expected = _lone_letter(required_label(item), letters)
        if expected is None:
            raise RewardError(f"expected one of the letters {letters} as label; found {item.label[:200]!r}")
        answer = between(item.response, after, before)
        return 1.0 if answer is not None and _chosen(answer, letters) == expected else 0.0

    return score


def required_label(item: Item) -> str:
    """The item's label. Raises RewardError when it has none."""
    if not item.label:
        raise RewardError("expected a label to compare with; found none. Give every row one (data.label_key)")
    return item.label


def between(text: str, after: str | None, before: str | None) -> str | None:
    """What follows the first `after` and precedes the next `before`; None when one of them is asked for and not there."""
    if after is not None:
        _, found, text = text.partition(after)
        if not found:
            return None
    if before is not None:
        text, found, _ = text.partition(before)
        if not found:
            return None
    return text


def last_number(text: str) -> str | None:
    """The last number in the text in a canonical spelling, so that equal numbers are equal strings; None without one."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _canonical(last.group())


def _canonical(number: str) -> str:
    number = number.rstrip(",")  # of the sentence
    if "," in number and not _GROUPED.fullmatch(number):
        number = number.rpartition(",")[2]  # a list of numbers, not one with thousands separators
    sign = "-" if number.startswith("-") else ""
    whole, _, fraction = number.lstrip("-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def _chosen(text: str, letters: str) -> str | None:
    _, boxed, rest = text.rpartition(r"\boxed{")
    if boxed:
        return _lone_letter(rest.partition("}")[0].replace(r"\text{", ""), letters)
    start = max(text.rfind("answer"), text.rfind("Answer"), text.rfind("ANSWER"))
    if start < 0:
        return _lone_letter(text, letters)
    behind = text[start : start + _WINDOW]
    found = [word for word in _WORD.finditer(behind) if len(word[0]) == 1 and word[0] in letters]
    found = [word for word in found if not _PRONOUN.match(behind, word.start())] or found
    return found[0][0] if found else None


def _lone_letter(text: str, letters: str) -> str | None:
    """The letter, when the text has no other word than it."""
    words = _WORD.findall(text) if len(text) <= _WINDOW else []
    return words[0].upper() if len(words) == 1 and len(words[0]) == 1 and words[0].upper() in letters else None
