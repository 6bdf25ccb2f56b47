"""Answers compared with the label: as text, as numbers, as choices. Invariant: linear time, and no label is an error, not a zero."""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError

_NUMBER = re.compile(r"(?:(?<![0-9])-\$?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?")
_FRACTION = re.compile(r"\s*-?[0-9]+\s*/\s*[0-9]+\s*")
_SPELLINGS = (("\u2212", "-"), ("{,}", ","), (r",\!", ","))  # of a minus, and of a thousands separator in LaTeX
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WORD = re.compile(r"[^\W_]+")
_ANSWER = re.compile(r"answer|Answer|ANSWER")
_CAPITAL = re.compile(r"(?<![^\W_])[A-Z](?![^\W_])")
_SMALL = re.compile(r"(?<=\()[a-z](?=\))|(?<=:\s)[a-z](?=\W*$)")
_FIRST = re.compile(r"\W*([^\W\d_])(?:\s*[).:\]]|\W*$)")  # a box begins with the letter, and may go on with what it stands for
_FONT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|bb|it|rm)|bf|rm)\b\s*\{?")
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

    1,234.50 equals 1234.5, 1.5e3 equals 1500 and 007 equals 7: numbers are compared by value, exactly, however long. A label that is
    a fraction is an error: the reward `math` compares those.

    Args:
        after: look only behind the first occurrence of this text in the response; a response without it scores 0.
        before: look only before the first occurrence of this text after that; a response without it scores 0.
    """

    def score(item: Item) -> float:
        expected = last_number(required_label(item))
        if _FRACTION.fullmatch(item.label):
            raise RewardError(
                f"expected a number in the label; found the fraction {item.label[:200]!r}, which the reward `math` compares"
            )
        if expected is None:
            raise RewardError(f"expected a number in the label; found {item.label[:200]!r}")
        answer = between(item.response, after, before)
        return 1.0 if answer is not None and last_number(answer) == expected else 0.0

    return score


def choice(letters: str = "ABCDEFGHIJ", after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the response chooses the label's letter (multiple choice); else 0.

    The choice is the letter that the last \boxed{...} begins with; without a box, the first capital behind the last "answer" or "Answer:"
    that has one, where the I of "I think" counts only when no other follows, or a small letter in brackets or at the very end; without
    that, a response that is the letter alone, however bracketed.

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
    for other, plain in _SPELLINGS:
        text = text.replace(other, plain)
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _canonical(last.group())


def _canonical(number: str) -> str:
    sign, number = "-" * number.startswith("-"), number.lstrip("-$")
    mantissa, _, exponent = number.lower().partition("e")
    mantissa = mantissa.rstrip(",")  # of the sentence
    if "," in mantissa and not _GROUPED.fullmatch(mantissa):
        sign, mantissa = "", mantissa.rpartition(",")[2]  # a list of numbers, not one with thousands separators
    whole, _, fraction = mantissa.replace(",", "").partition(".")
    if shift := int(exponent or 0):
        point, digits = len(whole) + shift, whole + fraction
        digits, point = digits.rjust(len(digits) - min(point, 0), "0").ljust(point, "0"), max(point, 0)
        whole, fraction = digits[:point], digits[point:]
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def _chosen(text: str, letters: str) -> str | None:
    _, boxed, rest = text.rpartition(r"\boxed{")
    if boxed:
        first = _FIRST.match(_FONT.sub("", rest[:_WINDOW]).partition("}")[0])
        return first[1].upper() if first and first[1].upper() in letters else None
    answers = list(_ANSWER.finditer(text))
    if not answers:
        return _lone_letter(text, letters)
    for answer in reversed(answers):
        behind = text[answer.end() : answer.end() + _WINDOW]
        capitals = [word for word in _CAPITAL.finditer(behind) if word[0] in letters]
        chosen = [word for word in capitals if not _PRONOUN.match(behind, word.start())] or capitals
        if chosen := chosen or [word for word in _SMALL.finditer(behind) if word[0].upper() in letters]:
            return chosen[0][0].upper()
    return None


def _lone_letter(text: str, letters: str) -> str | None:
    """The letter, when the text has no other word than it."""
    words = _WORD.findall(text) if len(text) <= _WINDOW else []
    return words[0].upper() if len(words) == 1 and len(words[0]) == 1 and words[0].upper() in letters else None
