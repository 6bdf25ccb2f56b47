r"""Multiple choice.

Invariant: a response chooses one letter or none, and the time is linear in the text.
"""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.response import MENTIONS, answer_text, corrected, last_box, required_label

_WORD = re.compile(r"[^\W_]+")
# Both cases are written out, since a case-insensitive search has no fast path.
_CUE = re.compile(r"(?:[Aa]nswer|ANSWER|(?:[Oo]ption|[Cc]hoice)\s+is|[Cc]hoose|[Pp]ick|[Ss]elect)\b")
_ALONE = re.compile(r"\W*(?:[Oo]ption|[Cc]hoice)\b(?=\W*\w\W*\Z)")
_CAPITAL = re.compile(r"(?<![^\W_])[A-Z](?![^\W_])")
_SMALL = re.compile(r"(?<=\()[a-z](?=\))|(?<=:\s)[a-z](?=\W*$)")
_FIRST = re.compile(r"\W*([^\W\d_])(?:\s*[).:\]]|\W*$)")  # starts with the letter, optionally followed by the text of that option
_FONT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|bb|it|rm)|bf|rm)\b\s*\{?")
_PRONOUN = re.compile(r"I(?:['\u2019]|\s+[a-z])")
_DENIED = re.compile(r"\b(?:not|instead of|rather than)\s+\W?[A-Z](?![^\W_])")
_ANOTHER = re.compile(r"\W{0,3}\s*(?:,|/|&|\band\b|\bor\b)\s*\W?([A-Z])(?![^\W_])(?!['\u2019]|\s+[a-z])")
_BEFORE = re.compile(r"(?<![^\W_])([A-Z])\W{0,3}\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b")
_CORRECTION = re.compile(r"\W*([A-Z])\W*")
_WINDOW = 100  # characters after "answer" that may contain the choice


def choice(letters: str = "ABCDEFGHIJ", after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the response chooses the label's letter (multiple choice), else 0.

    The choice is the first letter of the last \boxed{...}. Without a box, it is the first capital letter after the last "answer" or
    "Answer:" that has one (the "I" of "I think" counts only when no other letter follows), or a lower-case letter in brackets or at the
    end. Otherwise it is a response that consists of the letter alone, with or without brackets. A later correction ("no, B") replaces the
    choice. A letter after "not" does not count, two letters are not a choice, and text in <think>...</think> does not count.

    Args:
        letters: the options, in capital letters.
        after: search only after the first occurrence of this marker. A response without it scores 0.
        before: search only before the next occurrence of this marker. A response without it scores 0.
    """

    def score(item: Item) -> float:
        label = required_label(item)
        box = last_box(label)
        expected = _stated(label if box is None else box[0], letters)
        if expected is None:
            raise RewardError(f"expected one of the letters {letters} as label; found {label[:200]!r}")
        answer = answer_text(item, after, before)
        return 1.0 if answer is not None and _chosen(answer, letters) == expected else 0.0

    return score


def _chosen(text: str, letters: str) -> str | None:
    box = last_box(text)
    chosen, end = (_stated(box[0], letters), box[1]) if box is not None else _named(text, letters)
    if not end:
        return _lone_letter(text, letters)
    for _, sentence in corrected(text, end):
        if (letter := _CORRECTION.fullmatch(sentence)) and letter[1] in letters:
            chosen = letter[1]
    return chosen


def _named(text: str, letters: str) -> tuple[str | None, int]:
    """The letter that the last cue names, and the end of the cue, or 0 when the text has no cue."""
    alone = _ALONE.match(text)
    cues = [alone] if alone else list(_CUE.finditer(text))
    for cue in reversed(cues[-MENTIONS:]):
        behind = _DENIED.sub(lambda denied: " " * len(denied[0]), text[cue.end() : cue.end() + _WINDOW])
        capitals = [word for word in _CAPITAL.finditer(behind) if word[0] in letters]
        chosen = [word for word in capitals if not _PRONOUN.match(behind, word.start())] or capitals
        if chosen := chosen or [word for word in _SMALL.finditer(behind) if word[0].upper() in letters]:
            another = _ANOTHER.match(behind, chosen[0].end())
            return (None if another and another[1] in letters else chosen[0][0].upper()), cue.end()
    said = [match for match in _BEFORE.finditer(text) if match[1] in letters]
    if said:
        return said[-1][1], said[-1].end()
    return None, cues[-1].end() if cues else 0


def _stated(text: str, letters: str) -> str | None:
    """The first letter of a box or label, unless another option follows."""
    text = _FONT.sub("", text[:_WINDOW])
    first = _FIRST.match(text)
    if first is None or _ANOTHER.match(text, first.end(1)):
        return None
    return first[1].upper() if first[1].upper() in letters else None


def _lone_letter(text: str, letters: str) -> str | None:
    """The letter if it is the only word of the text."""
    words = _WORD.findall(text) if len(text) <= _WINDOW else []
    return words[0].upper() if len(words) == 1 and len(words[0]) == 1 and words[0].upper() in letters else None
