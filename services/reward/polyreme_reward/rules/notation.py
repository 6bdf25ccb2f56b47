r"""Rewrites notation that math-verify's parser does not know, or reads as something else.

Invariant: what a careful reader understands does not change, and the time is linear in the text, whose length `formula` bounds.
"""

import re

from polyreme_reward.rules.spelling import command

_RADICAL = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(")
_DEGREES = re.compile(rf"(\d+(?:\.\d+)?|\.\d+)\s*(?:\^\s*\{{?\s*{command('circ')}\s*\}}?|\u00b0|{command('degree')})")
_ANGLE = re.compile(r"(?<![a-zA-Z])(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z]*h)")
_INTEGERS = r"(?:\\mathbb\s*\{?\s*Z\s*\}?|\\mathbf\s*\{\s*Z\s*\}|Z)"
_RANGE = re.compile(
    rf"(?<=[\w)}}\]])\s*(?:[,;]\s*|\\?[,;:]?\s*(?=\\?\(|\\text))"
    rf"(?:\\text\s*\{{\s*(?:where|for|with)\s*\}}\s*)?(?:\\left)?[(\[]?\s*[a-zA-Z]\s*\\in(?![a-zA-Z])\s*"
    rf"{_INTEGERS}\s*(?:\\right)?[)\]]?\s*$"
)
_BUILDER = re.compile(
    r"\\?\{\s*(?P<symbol>[a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\(?:mid|vert|colon|middle\s*\|)(?![a-zA-Z])|[|:])\s*(?P<condition>[^|]*?)\s*\\?\}\s*"
)
_ORDER = re.compile(r"[<>=]|\\(?:le|ge|leq|geq|ne|neq|lt|gt)(?![a-zA-Z])")
_CONGRUENT = re.compile(
    r"(?:(?P<left>.+?)\s*(?:\\equiv(?![a-zA-Z])|\u2261))?(?P<right>.+?)\s*"
    r"(?P<residue>\\pmod(?![a-zA-Z])|\\?\(\s*\\?mod(?![a-zA-Z]))?"
    r"(?(residue)|(?:\\bmod|\\mod|(?<![a-zA-Z])mod)(?![a-zA-Z]))\s*(?P<modulus>\{\s*\d{1,9}\s*\}|\d{1,9})\s*\)?"
)
_EITHER = re.compile(rf"\s*(?:{command('lor', 'vee', 'land', 'wedge')}|[\u2227\u2228])\s*")
_VECTOR = re.compile(
    r"\\(?:hat|vec)\s*(?:\{\s*\\?(?:mathbf\s*\{\s*)?([a-zA-Z])(?:math)?\s*\}{1,2}|\\?([a-zA-Z])(?:math)?(?![a-zA-Z]))"
)
_BRACKETED = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])+\s*\]|\[\s*\[[^\[\]]*\]\s*\]")
_GREEK = r"\\(?:pi|alpha|beta|gamma|theta|lambda|mu|omega|phi|sigma|tau)(?![a-zA-Z])"
GLUED = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log"

_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:text|mathrm)\s*\{\s*(infinity|pi|infty)\s*\}", r"\\\1 "),
        (r"\\infinity", r"\\infty"),
        (r"\\varnothing|\u2205|\\\{\s*\\\}", r"\\emptyset "),
        ("\u211d", r"\\mathbb{R}"),
        ("\u2124", r"\\mathbb{Z}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        ("\u221b\\s*(\\d+|[a-z])", r"\\sqrt[3]{\1}"),
        ("\u221b\\s*\\(([^()]*)\\)", r"\\sqrt[3]{\1}"),
        (r"(?<![\\a-zA-Z])sqrt(?=\s*[\d({\[])", r"\\sqrt"),
        (rf"(?<![\\a-zA-Z])({GLUED})(?=[xyz](?![a-zA-Z]))", r"\\\1 "),
        (rf"\\frac\s*({_GREEK}|[0-9a-zA-Z])", r"\\frac{\1}"),
        (rf"(\\frac\s*\{{[^{{}}]*\}})\s*({_GREEK}|[0-9a-zA-Z])", r"\1{\2}"),
        (r"\^\s*(?:-|\\-)\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"^{-\1}"),
        (r"(?<![a-zA-Z\\])lg(?![a-zA-Z])|\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"^\s*\]\s*([^\[\],;]+[,;][^\[\],;]+)\[\s*$", r"(\1)"),
    )
]


def familiar(text: str) -> str:
    """A formula in the notation that the parser knows: roots with brackets, degrees of functions of angles, sets by a condition,
    the integers as range of a parameter behind the formula, vectors with a hat or an arrow, matrices as nested lists."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _RANGE.sub("", _radicals(text))
    if builder := _BUILDER.fullmatch(text.strip()):
        text = builder["condition"] if _ORDER.search(builder["condition"]) else text
    if _ORDER.search(text):
        text = _EITHER.sub(", ", text)
    if _ANGLE.search(text):
        text = _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)
    text = _VECTOR.sub(lambda found: f" v_{{{found[1] or found[2]}}} ", text)
    return _BRACKETED.sub(lambda found: _matrix(found[0]), text)


def congruence(text: str) -> tuple[str, str, int] | None:
    """The sides and the modulus of a congruence, x \\equiv 3 \\pmod 5 or 3 \\pmod 5, whose left side is then ''."""
    found = _CONGRUENT.fullmatch(text.strip())
    if (
        found is None
        or (found["left"] is None and found["residue"] is None)
        or not (modulus := int(found["modulus"].strip("{ }")))
    ):
        return None
    return (found["left"] or "").strip(), found["right"].strip(), modulus


def _radicals(text: str) -> str:
    r"""The text with braces around the argument of each root in brackets: \sqrt(x + 1)."""
    place = 0
    while found := _RADICAL.search(text, place):
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            return text
        text = f"{text[: found.start()]}\\sqrt{found[1] or ''}{{{text[found.end() : end - 1]}}}{text[end:]}"
        place = found.start() + 5
    return text


def _matrix(text: str) -> str:
    rows = re.findall(r"\[([^\[\]]*)\]", text.strip()[1:-1])
    return r"\begin{pmatrix}" + r"\\".join(row.replace(",", "&") for row in rows) + r"\end{pmatrix}"
