r"""Finds the answer in a response.

Invariant: text in <think>...</think> is never an answer, a later answer replaces an earlier one, and time is linear in the text.
"""

import re
from collections.abc import Iterator

from polyreme_reward.items import NO_LABEL, Item, RewardError
from polyreme_reward.rules import quantity
from polyreme_reward.rules.spelling import plain

TAIL = 1 << 18
"""Number of characters at the end of a response that are searched for an answer."""

MENTIONS = 50
"""Maximum number of cues, from the end of a response, that are examined for an answer or a correction."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_CALCULATION = re.compile(r"<<[-\d\s.,+*/()%$]{1,200}=[-\d\s.,%$]{1,50}>>")
_OPENING = ("<think>", "<thinking>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:\\[)\]])?[\s$]*(?:[,;]|(?:,\s*)?(?:and|or)\b)[\s$]*(?:\\[(\[])?[\s$]*")
# Both cases are written out, since a case-insensitive search has no fast path.
ANSWER = (
    r"[Aa]nswer|ANSWER|[Aa]ntwort|ANTWORT|[Ll]\u00f6sung|[Rr][\u00e9e]ponse|R\u00c9PONSE|[Rr]espuesta|RESPUESTA|[Rr]esposta"
    r"|[Rr]isposta|[Aa]ntwoord|[Oo]dpowied[\u017az]|[\u041e\u043e]\u0442\u0432\u0435\u0442"
    r"|[\u0412\u0432]\u0456\u0434\u043f\u043e\u0432\u0456\u0434\u044c|\u7b54\u6848|\u56de\u7b54|\u89e3\u7b54|\u6b63\u89e3"
    r"|\u7b54\u3048|\u7b54\u3010|\u7b54(?=\s*[:\uff1a\u662f\u70ba\u4e3a])|\uc815\ub2f5|\ub2f5\ubcc0|\ub2f5(?=\s*[:\uff1a\uc740])"
    r"|\u0627\u0644\u0625\u062c\u0627\u0628\u0629|\u0627\u0644\u062c\u0648\u0627\u0628|\u0909\u0924\u094d\u0924\u0930"
    r"|\u091c\u0935\u093e\u092c|[Cc]evap|[Ss]varet|[Rr][\u0103a]spunsul|[Oo]dpov\u011b\u010f|[Oo]dpove\u010f|[Vv]astaus"
    r"|[Vv]\u00e1lasz|[Oo]dgovor|\u0391\u03c0\u03ac\u03bd\u03c4\u03b7\u03c3\u03b7"
    r"|\u03b1\u03c0\u03ac\u03bd\u03c4\u03b7\u03c3\u03b7|\u0e04\u0e33\u0e15\u0e2d\u0e1a|\u05ea\u05e9\u05d5\u05d1\u05d4"
    r"|\u067e\u0627\u0633\u062e|\u062c\u0648\u0627\u0628|\u0989\u09a4\u09cd\u09a4\u09b0|\u0baa\u0ba4\u0bbf\u0bb2\u0bcd"
    r"|\b[Aa]ns(?=[.:]|\s+is\b)|[\u0110\u0111]\u00e1p \u00e1n|[Tt]r\u1ea3 l\u1eddi|[Jj]awaban"
)
"""A pattern of the words that announce an answer."""
_CUE = re.compile(
    rf"(?:(?:[Aa]nswer|ANSWER)\b(?:\s+(?:to|of|for)\b[^.:\n]{{0,80}}?)?|{ANSWER})[\s*_]*"
    r"(?:\b(?:is|are|IS|equals|(?:would|should|must) be|ist|lautet|est|es|\u00e9|\u00e8|jest)\b|is(?=n['\u2019]t\b)|[:=\uff1a]"
    r"|[\u5e94\u61c9]?[\u8be5\u5f53\u7576]?(?:[\u662f\u4e3a\u70ba]|\u7b49\u4e8e)|[\u306f\uc740\ub294]|(?=\u4e0d\u662f|\u5e76\u975e))"
    r"[\s*_:\uff1a]*"
)
_CORRECTION = re.compile(
    r"\b(?:no(?=\s*[,.:;!\u2026\u2014-]|\s+(?:wait|actually|sorry|it)\b)|wait|actually|correction|sorry|oops"  # it has no 7
    r"|i mean|i meant|make that|hold on)\b"
    r"(?=[\s,.:;!\u2026\u2014-])[\s,.:;!\u2026\u2014-]*"
    r"(?:\b(?:no|wait|actually|sorry|but|so|the|correct|right|real|final|answer|result|value"
    r"|(?:it|that)(?:['\u2019]s)?|is|should|must|would|be)\b[\s,:]*)*",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"(?:\$[^$\n]+\$|\\\([^\n]+\\\)|[-+\u2212]?[$\u20ac\u00a3]?\.?\d\S*(?:\s+[^\W\d_]+){0,2})[\s*_.!]*")
_HEADED = re.compile(  # a heading, and a line with nothing but a value
    rf"(?:(?<=\n)|\A)[#*_ ]{{1,10}}(?:(?:[Tt]he|[Ff]inal|FINAL) ){{0,2}}(?:{ANSWER})[*_: ]*\n"
    rf"[\s*_]*({_CORRECTED.pattern})(?:\n|\Z)"
)
_SENTENCE_END = re.compile(r"\n|\.\.\.|(?<!\\)[.!?](?=[\s*_]|$)|[\u3002\uff01\uff1f]|\uff0e(?!\d)")
_SENTENCE = 1000
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_LINE_END = re.compile(r"\n")
_REASON = re.compile(
    r",?\s+(?:because|since|as|so|which|where|when|hence|therefore|for|if|after|out of)\b"
    r"|,?\s+(?:and (?:it|this|that|he|she|they|we|there)|weil|denn|car|parce|porque)\b"
    r"|[,\uff0c](?=\s*[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])(?!\s*(?:[\u800c\u6216\u548c\u4e0e\u53ca\u4ee5]|\u4e0d\u662f|\u5e76\u975e))"
)
_DENIED_BEFORE = re.compile(
    r"\s*(?:not|n['\u2019]t)\b.*?(?:\bbut\b|,)\s*(?:rather\b|it is\b|it's\b)?\s*|\s*(?:\u4e0d\u662f|\u5e76\u975e).*?\u800c\u662f"
)
_DENIED_BEHIND = re.compile(
    r",?\s*\b(?:and\s+)?(?<!does )(?<!do )(?<!is )(?<!are )(?:not|n['\u2019]t|instead of|rather than)\b.*"
    r"|[,\uff0c]?\s*(?:\u800c?\u4e0d\u662f|\u5e76\u975e|\u800c\u975e).*"
)
ASIDE = re.compile(r"(?<=[\w%\u00b0\u00b2\u00b3])\s+\((?!\s*(?:mod|or|and)\b)[^()\n\\]*[a-z]{3}[^()\n\\]*\)[\s.]*\Z")
"""What a text adds in brackets at its end: 42 (see step 5), 42 minutes (0.7 hours)."""
_REMARK = re.compile(
    r"(?:\s*[,;:]\s*|\s+-+\s+(?=\w{4})|\s*[\u2013\u2014]\s*)(?=[^\W\d_]{2,}[\s,.])(?!(?:or|and|i\.e|that is|namely|equal\w*"
    r"|equivalent\w*|approx\w*|about|roughly|around|plus|minus|times|rounded [^.]*?to [\d,.]+\W*\Z|oder|und|ou|et|pi|sqrt|sin"
    r"|cos|tan|log|ln)\b)"
    r"|\s*[(\uff08](?!\s*(?:mod|or|and)\b)(?=\s*=|[^()\n\\]{0,99}(?:[^\W\d_]{3}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]))"
    r"|\s+(?:(?:in|on|at)\s+(?!\d+\W*\Z)|by\s+(?!\d)|(?:with|using|from|during|within|via|found|obtained|computed|calculated|given"
    r"|based|leaving|while|whereas|nach|f\u00fcr|mit|bei|von|pour|avec|apr\u00e8s|sur|para|con|tras|en)\s)"
)
"""What may begin a remark behind a whole value: 42, found in 3 ways; 42 (3 steps); 42 with 3 left."""
_RESULT = re.compile(r"(?:(?:\d|\w{3})\s*=|\b(?:making|totall?ing|total of))\s*\S{1,40}\W*\Z")  # 3 boxes with 14 each = 42
_HEDGE = re.compile(r"(?:about|approximately|roughly|exactly|just|only|simply)\s+")
_MATHEMATICAL = re.compile(r"[\d$\\]")


def required_label(item: Item) -> str:
    """The item's label. Raises RewardError when it has none."""
    if item.label is None or not item.label.strip():
        raise RewardError(f"{NO_LABEL}. Add one to every row (data.label_key)")
    return item.label


def between(text: str, after: str | None, before: str | None) -> str | None:
    """The text between the first `after` and the next `before`, or None when one of these markers is given but absent."""
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
    """The response between the markers, without its thoughts and without GSM8K's calculations (<<9*2=18>>18). None when a marker
    is absent or a thought is not closed."""
    text = _without_thoughts(item)
    if text is not None:
        text = between(text, after, before)
    return None if text is None else _CALCULATION.sub("", _THINK.sub("", text)[-TAIL:])


def marked(text: str, words: bool = False) -> str | None:
    r"""The answer that the text marks as such, or None. '' when the last box is incomplete.

    The last \boxed{...} has priority (boxes that are joined by a comma or "and" are one answer), then the text after the last
    "####", then the sentence of the last "answer is" or "answer:". A later correction ("no, 42") replaces the answer.

    Args:
        text: the result of `answer_text`.
        words: accept any sentence as an answer; otherwise only one with a digit or LaTeX.
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
    """The content of the last box, joined by ", " with the boxes that belong to it, and its end. '' for an incomplete box."""
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
    """Yields the position and the rest of the sentence for each correction word after `start`."""
    for word in list(_CORRECTION.finditer(text, start))[-MENTIONS:]:
        yield word.end(), text[word.end() : _until(text, word.end(), _SENTENCE_END)]


def without_denied(text: str) -> str:
    """The text without the values that it rules out: "42, not 41", "not 41 but 42"."""
    return (
        _DENIED_BEHIND.sub("", _DENIED_BEFORE.sub("", text, count=1))
        if _DENIED_BEFORE.match(text)
        else _DENIED_BEHIND.sub("", text)
    )


def _without_thoughts(item: Item) -> str | None:
    """The response with empty thoughts, whose tags stay for the markers. None when the last thought is not closed."""
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
            if not inside:  # the prompt or an outer thought contains the opening tag
                kept.clear()
            begin, inside = tag.start(), False
    return None if inside else "".join(kept) + text[begin:]


def _closing(text: str, start: int) -> int | None:
    """Position of the brace that closes the one opened before `start`, or None."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return None


def _named(text: str, words: bool) -> tuple[str, int] | None:
    """The sentence after the last "answer is" that has a value, and its end."""
    for cue in reversed(list(_CUE.finditer(text))[-MENTIONS:]):
        formula = _FORMULA.match(text, cue.end(), cue.end() + _SENTENCE)
        end = _until(text, formula.end() if formula else cue.end(), _SENTENCE_END)
        end = cue.end() + _value_end(text[cue.end() : end])
        sentence = ASIDE.sub("", without_denied(text[cue.end() : end]).strip(" *_"))
        if sentence and (words or _MATHEMATICAL.search(sentence)):
            return sentence, end
    headed = list(_HEADED.finditer(text))[-1:]
    return (headed[0][1].strip(" *_"), headed[0].end(1)) if headed else None


def _value_end(sentence: str) -> int:
    """Where the answer ends in its sentence: before its reason, or before a remark if a whole value precedes that."""
    reason = _REASON.search(sentence)
    end = reason.start() if reason else len(sentence)
    for remark in [] if _RESULT.search(sentence, 0, end) else list(_REMARK.finditer(sentence, 0, end))[:3]:
        value = _HEDGE.sub("", sentence[: remark.start()].strip(" *_"))
        if _FORMULA.fullmatch(value) or quantity.read(plain(value)) is not None:
            return remark.start()
    return end


def _until(text: str, start: int, end: re.Pattern[str]) -> int:
    """End of the line or sentence that begins at `start`, at most _SENTENCE characters later."""
    found = end.search(text, start, start + _SENTENCE)
    return found.start() if found else min(len(text), start + _SENTENCE)
