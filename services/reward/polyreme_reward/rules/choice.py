r"""Multiple choice.

Invariant: a response chooses one letter or none, and the time is linear in the text.
"""

import re
from collections.abc import Callable

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.response import ANSWER, MENTIONS, answer_text, corrected, last_box, required_label
from polyreme_reward.rules.spelling import unified

# A letter stands alone beside characters of other scripts, which write no space: \u9009B, B\u9009\u9879.
_LATIN = r"A-Za-z0-9_\u00aa\u00ba\u00c0-\u024f\u0370-\u03ff\u0400-\u052f"
_APART = rf"(?<![{_LATIN}])"
_ENDS = rf"(?![{_LATIN}])"
_WORD = re.compile(r"[^\W_]+")
# Words that announce the choice, as `ANSWER`.
_PICK = (
    r"(?:[Oo]ption|[Cc]hoice)\s+is\b|\b[Cc]orrect(?:\s+(?:option|choice|letter))?(?=\W{0,3}:|\s+is\b)|[Cc]hoose\b"
    r"|[Gg]o(?:ing)?\s+with\b|(?:[Mm]y|[Ff]inal)\s+choice\s*:|[Pp]ick\b|[Ss]elect\b|[Ww]\u00e4hle\b|\u9009\u62e9|\u9078\u64c7"
    r"|\u9078\u629e\u80a2?|\u9009\u9879|\u9078\u9805|\u9009|\u9078|\u6b63[\u786e\u78ba]\u7684?\u662f"
    r"|\uc120\ud0dd|[\u0412\u0432]\u044b\u0431\u0438\u0440\u0430\u044e|(?:[Rr]ichtig|[Kk]orrekt)\s+ist\b"
    r"|[\u041f\u043f]\u0440\u0430\u0432\u0438\u043b\u044c\u043d\w+\s+\u0432\u0430\u0440\u0438\u0430\u043d\u0442"
    r"|[Bb]onne\s+option\s+est\b|[Ll]a\s+(?:opci\u00f3n|correcta)\s+(?:correcta\s+)?es\b|[Oo]pci\u00f3n\s+correcta\b"
)
_CUE = re.compile(rf"(?:{ANSWER}|{_PICK})")
_ALONE = re.compile(r"\W*(?:[Oo]ption|[Cc]hoice|[Oo]pci\u00f3n|\u9009\u9879|\u9078\u9805)(?=\W*\w\W*\Z)")
_CAPITAL = re.compile(rf"{_APART}[A-Z]{_ENDS}")
_SMALL = re.compile(r"(?<=\()[a-z](?=\))|(?<=:\s)[a-z](?=\W*$)|(?<=:)[a-z](?=\W*$)")
_SAID = re.compile(
    r"(?:^|[.!?\n])\W*(?:(?:[Tt]herefore|[Tt]hus|[Ss]o|[Hh]ence)\W+)?"
    r"(?:(?:[Ii]t(?:'s|\s+is|\s+must\s+be)|[Oo]ption|[Cc]hoice)\s+)?\W*([A-Z])\W*\Z"
)
_FIRST = re.compile(
    rf"\W*([^\W\d_])(?:\s*[).:,\]](?![A-Za-z0-9])|\W*$|(?=[^{_LATIN}\W]))"
)  # starts with the letter, or with the text of that option
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:bf|bb|it|rm|sf|tt|up)|operatorname|mbox|bf|rm)(?![a-zA-Z])\s*\{?"
)
_PRONOUN = re.compile(r"I(?:'|\s+[a-z])")
_ARTICLE = re.compile(r"A\s+(?!(?:and|as|because|but|by|for|if|is|not|or|over|since|was|with|u\w*|is\w*|e\w*|o\w*|y)\b)[a-z]")
_DENIED = re.compile(
    rf"(?:\b(?:not|instead of|rather than|anything but|except|never)(?:\s+be)?|n't(?:\s+be)?|\bcannot\s+be)"
    rf"\s+(?:option\s+|choice\s+)?\W{{0,3}}[A-Z]{_ENDS}|\b(?:nicht|kein\w*|statt|pas|no es|\u043d\u0435)\s+\W?[A-Z]{_ENDS}"
    rf"|(?:\u4e0d\u662f|\u800c\u975e|\u5e76\u975e|\u4e0d\u9009|\u4e0d\u9078)\s*\W?[A-Z]{_ENDS}"
    rf"|{_APART}[A-Z]\s*(?:\u3067\u306f\u306a\u304f|\uac00 \uc544\ub2c8)"
)
_REFUSED = re.compile(r"(?:\bnot|n't|\bnever|\bnicht|\u4e0d)\s*$")  # I would not choose B
_ANOTHER = re.compile(
    rf"\W{{0,3}}\s*(?:[,;/&|+]|\band\b|\bor\b|\bund\b|\boder\b|\bet\b|\bou\b|\by\b|\bo\b|\u548c|\u6216\u8005?|\u4e0e|\u53ca"
    rf"|\u3068|\u307e\u305f\u306f|\uacfc|\uc640|\u0438(?:\u043b\u0438)?)\s*\W?([A-Z]){_ENDS}(?!'|\s+[a-z])"
)
_BEFORE = re.compile(
    rf"{_APART}([A-Z])\W{{0,3}}(?:\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b|\s+ist\s+(?:die\s+)?(?:richtig|korrekt)"
    r"|\s*(?:\u9009\u9879|\u9078\u9805)\s*$|\s+est\s+(?:la\s+)?(?:bonne|correcte)|\s+es\s+(?:la\s+)?(?:correcta|respuesta)"
    r"|\s*(?:\u9009\u9879|\u9805|\u9879)?\s*(?:\u662f|\u70ba|\u4e3a)?\s*(?:\u6b63\u786e|\u6b63\u78ba|\u5bf9\u7684|\u5c0d\u7684)"
    r"|\s*[\u304c\u306f]\s*(?:\u6b63\u89e3|\u6b63\u3057\u3044)|\s*(?:\uc774|\uac00)?\s*(?:\uc815\ub2f5|\ub9de))"
)
_CORRECTION = re.compile(r"\W*([A-Z])\W*")
_LED = re.compile(rf"\W*([A-Z])(?:\)\W*\w|[.:](?:\W*\s\W*|(?=[^{_LATIN}\W]))\w|\s+[-\u2013\u2014]\s+\w|[^\w\n]*\n\W*\w\w)")
_CORRECTED = re.compile(
    r"\W*[A-Za-z]\W+(?:(?:no|wait|sorry|actually)\b[\s,.:;!-]*)+(?:(?:it|that)(?:'s|\s+is)\s+|make that\s+)?\W?([A-Z])\W*\Z",
    re.IGNORECASE,
)
_LINE = re.compile(r"^\W*([A-Z])[).:]\s", re.MULTILINE)
_WINDOW = 100  # characters after "answer" that may contain the choice


def choice(letters: str = "ABCDEFGHIJ", after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the response chooses the label's letter (multiple choice), else 0.

    The choice is the first letter of the last \boxed{...}. Without a box, it is the first capital letter after the last "answer"
    or "Answer:" that has one (the "I" of "I think" counts only when no other letter follows), or a lower-case letter in brackets
    or at the end. The word for answer may be of another language, and characters of other scripts may stand beside the letter.
    Otherwise it is a response that consists of the letter alone, with or without brackets, or of one option with its text: "A.
    Paris". A later correction ("no, B") replaces the choice. A letter after "not" does not count, two letters are not a choice,
    and text in <think>...</think> does not count.

    Args:
        letters: the options, in capital letters.
        after: search only after the first occurrence of this marker. A response without it scores 0.
        before: search only before the next occurrence of this marker. A response without it scores 0.
    """

    def score(item: Item) -> float:
        label = unified(required_label(item))
        box = last_box(label)
        expected = _stated(label if box is None else box[0], letters) or (_named(label, letters)[0] if box is None else None)
        if expected is None:
            raise RewardError(f"expected one of the letters {letters} as label; found {label[:200]!r}")
        answer = answer_text(item, after, before)
        return 1.0 if answer is not None and _chosen(unified(answer), letters) == expected else 0.0

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
        if _REFUSED.search(text, max(0, cue.start() - 30), cue.start()):
            continue
        behind = _FONT.sub("", text[cue.end() : cue.end() + _WINDOW])
        behind = _DENIED.sub(lambda denied: " " * len(denied[0]), behind)
        capitals = [word for word in _CAPITAL.finditer(behind) if word[0] in letters and not _ARTICLE.match(behind, word.start())]
        chosen = [word for word in capitals if not _PRONOUN.match(behind, word.start())] or capitals
        if chosen := chosen or [word for word in _SMALL.finditer(behind) if word[0].upper() in letters]:
            another = _ANOTHER.match(behind, chosen[0].end())
            return (None if another and another[1] in letters else chosen[0][0].upper()), cue.end()
    said = [match for match in _BEFORE.finditer(text) if match[1] in letters]
    if said:
        return said[-1][1], said[-1].end()
    if (last := _SAID.search(text[-_WINDOW:])) and last[1] in letters:
        return last[1], len(text)
    return None, cues[-1].end() if cues else 0


def _stated(text: str, letters: str) -> str | None:
    """The first letter of a box or label, unless another option follows."""
    text = _FONT.sub("", text[:_WINDOW])
    first = _FIRST.match(text)
    if first is None or _ANOTHER.match(text, first.end(1)):
        return None
    return first[1].upper() if first[1].upper() in letters else None


def _lone_letter(text: str, letters: str) -> str | None:
    """The letter if it is the only word of the text, or if the text is one option: "A. Paris"."""
    words = _WORD.findall(text) if len(text) <= _WINDOW else []
    if len(words) == 1 and len(words[0]) == 1 and words[0].upper() in letters:
        return words[0].upper()
    if len(text) <= _WINDOW and (begun := _CORRECTED.match(text)):
        return begun[1].upper() if begun[1].upper() in letters else None
    options = _LINE.findall(text[: _WINDOW * 10])
    led = _LED.match(text)
    return led[1] if led is not None and led[1] in letters and len(options) < 2 else None
