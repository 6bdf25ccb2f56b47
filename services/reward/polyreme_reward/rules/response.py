r"""Which part of a response is its answer.

Invariant: text inside <think>...</think> is never an answer, a later answer replaces an earlier one, and the time is linear in the text.
"""

import re
from collections.abc import Iterator

from polyreme_reward.items import NO_LABEL, Item, RewardError

TAIL = 1 << 18
"""Characters at the end of a response in which an answer is looked for."""

MENTIONS = 50
"""Places at the end of a response that are examined for an answer or a correction."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_OPENING = ("<think>", "<thinking>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:\\[)\]])?[\s$]*(?:[,;]|(?:,\s*)?(?:and|or)\b)[\s$]*(?:\\[(\[])?[\s$]*")
# Both cases by hand: a search that ignores case has no fast path.
_CUE = re.compile(
    r"(?:[Aa]nswer|ANSWER)\b(?:\s+(?:to|of|for)\b[^.:\n]{0,80}?)?[\s*_]*(?:\b(?:is|are|IS|equals|(?:would|should|must) be)\b|[:=])[\s*_:]*"
)
_CORRECTION = re.compile(
    r"\b(?:no|wait|actually|correction|sorry|oops|i mean|i meant|make that|hold on)\b(?=[\s,.:;!\u2026\u2014-])[\s,.:;!\u2026\u2014-]*"
    r"(?:\b(?:no|wait|actually|sorry|but|so|the|correct|right|real|final|answer|result|value|it|that|is|it's|that's|should|must|would|be)\b"
    r"[\s,:]*)*",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"(?:\$[^$\n]+\$|\\\([^\n]+\\\)|[-+\u2212]?[$\u20ac\u00a3]?\.?\d\S*(?:\s+[^\W\d_]+){0,2})[\s*_.!]*")
_SENTENCE_END = re.compile(r"\n|\.\.\.|(?<!\\)[.!?](?=[\s*_]|$)")
_SENTENCE = 1000
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_LINE_END = re.compile(r"\n")
_REASON = re.compile(r",?\s+(?:because|since|as|so|which|where|when|hence|therefore|for|if|after)\b")
_DENIED_BEFORE = re.compile(r"\s*not\b.*?(?:\bbut\b|,)\s*(?:rather\b|it is\b|it's\b)?\s*")
_DENIED_BEHIND = re.compile(r",?\s*\b(?:and\s+)?(?<!does )(?<!do )(?<!is )(?<!are )(?:not|instead of|rather than)\b.*")
_MATHEMATICAL = re.compile(r"[\d$\\]")


def required_label(item: Item) -> str:
    """The item's label. Raises RewardError when it has none."""
    if not item.label.strip():
        raise RewardError(f"{NO_LABEL}. Give every row one (data.label_key)")
    return item.label


def between(text: str, after: str | None, before: str | None) -> str | None:
    """What follows the first `after` and precedes the next `before`; None when one of them is asked for and absent."""
    if after is not None:
        _, found, text = text.partition(after)
        if not found:
            return None
    if before is not None:
        text, found, _ = text.partition(before)
        if not found:
            return None
    return text


def answer_text(item: Item, after: str | None, before: str | None) -> str | None:
    """The response without its thoughts, between the markers; None without an answer: a marker is absent, or a thought has no end."""
    text = _without_thoughts(item)
    if text is not None:
        text = between(text, after, before)
    return None if text is None else _THINK.sub("", text)[-TAIL:]


def marked(text: str, words: bool = False) -> str | None:
    r"""The answer that the text marks as such; None when it marks none, '' when the last box was cut off.

    The last \boxed{...} goes first (several that a comma or an "and" joins are one answer), then what follows the last "####", then
    the sentence of the last "answer is" or "answer:". A correction behind it ("no, 42") replaces it.

    Args:
        text: as `answer_text` gives it.
        words: take any sentence as an answer; else only one with a digit or LaTeX in it.
    """
    found = last_box(text)
    if found is None and "####" in text:
        begin = text.rindex("####") + 4
        end = _until(text, begin, _LINE_END)
        found = text[begin:end], end
    found = found or _named(text, words)
    if found is None:
        return None
    corrections = [value for start, value in corrected(text, found[1]) if _CORRECTED.fullmatch(value)]
    return (corrections[-1] if corrections else found[0]).strip()


def last_box(text: str) -> tuple[str, int] | None:
    """What the last box holds, joined with the boxes that belong to it by ", ", and where it ends; '' for a box that was cut off."""
    boxes = list(_BOX.finditer(text))
    contents: list[str] = []
    end = begin = 0
    for box in reversed(boxes):
        close = _closing(text, box.end())
        if close is None:
            if not contents:
                return "", len(text)
            break
        if contents and not _BETWEEN_BOXES.fullmatch(text[close + 1 : begin]):
            break
        end, begin = end or close + 1, box.start()
        contents.append(text[box.end() : close])
    return (", ".join(reversed(contents)), end) if contents else None


def corrected(text: str, start: int) -> Iterator[tuple[int, str]]:
    """What follows each word of correction behind `start`, to the end of its sentence, with its position."""
    for word in list(_CORRECTION.finditer(text, start))[-MENTIONS:]:
        yield word.end(), text[word.end() : _until(text, word.end(), _SENTENCE_END)]


def without_denied(text: str) -> str:
    """The text without what it says the answer is not: "42, not 41", "not 41 but 42"."""
    return (
        _DENIED_BEHIND.sub("", _DENIED_BEFORE.sub("", text, count=1))
        if _DENIED_BEFORE.match(text)
        else _DENIED_BEHIND.sub("", text)
    )


def _without_thoughts(item: Item) -> str | None:
    """The response with its thoughts emptied, their tags kept for markers; None when the last thought has no end."""
    text = item.response
    begun = item.templated_prompt.rstrip().endswith(_OPENING)
    inside = begun and not text.lstrip().startswith(_OPENING)
    kept: list[str] = []
    begin = 0
    for tag in _THINK.finditer(text):
        if not tag[1] and not inside:
            kept.append(text[begin : tag.end()])
            inside = True
        elif tag[1]:
            if not inside:  # the prompt, or an outer thought, opened it
                kept.clear()
            begin, inside = tag.start(), False
    return None if inside else "".join(kept) + text[begin:]


def _closing(text: str, start: int) -> int | None:
    """Where the brace that is open at `start` closes."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return None


def _named(text: str, words: bool) -> tuple[str, int] | None:
    """The sentence behind the last "answer is" that has a value, and where it ends."""
    for cue in reversed(list(_CUE.finditer(text))[-MENTIONS:]):
        formula = _FORMULA.match(text, cue.end(), cue.end() + _SENTENCE)
        end = _until(text, formula.end() if formula else cue.end(), _SENTENCE_END)
        sentence = text[cue.end() : end]
        reason = _REASON.search(sentence)
        sentence = without_denied(sentence[: reason.start()] if reason else sentence).strip(" *_")
        if sentence and (words or _MATHEMATICAL.search(sentence)):
            return sentence, cue.end() + (reason.start() if reason else end - cue.end())
    return None


def _until(text: str, start: int, end: re.Pattern[str]) -> int:
    """Where the line or sentence that begins at `start` ends; a sentence ends after _SENTENCE characters."""
    found = end.search(text, start, start + _SENTENCE)
    return found.start() if found else min(len(text), start + _SENTENCE)
