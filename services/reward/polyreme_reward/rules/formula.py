r"""Reads expressions, equations, sets, intervals and matrices with math-verify's parser.

Invariant: prose, and text that does not parse completely as LaTeX, is not a formula. A text that is too long, nested too deeply,
or that the parser would compute at length, is none either. Only worker processes, which have a deadline, import this module.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]

from polyreme_reward.rules import compare, relations, sides
from polyreme_reward.rules.notation import congruence, familiar
from polyreme_reward.rules.spelling import command, plain, unified, upright, words

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every call that its own timeouts are off

LONGEST = 500
"""Maximum characters of a formula that is parsed."""

_CONFIG = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
        ),
    )
]
_FUNCTION_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|gcd|lcm|max|min"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[\u2013\u2014]", "-"),
        (r"(?<=\d)(?:\{\s*,\s*\}|,\\!|\\,)\s*(?=\d{3}(?!\d))", ""),
        (rf"{command('displaystyle', 'textstyle', 'limits')}|(?<!\\)\\[,;:>! ]", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        ("\u221a\\s*\\{", r"\\sqrt{"),
        ("\u221a\\s*\\(([^()]*)\\)", r"\\sqrt{\1}"),
        ("\u221a", r"\\sqrt "),
        ("\u221e", r"\\infty "),
        ("\u03c0", r"\\pi "),
        ("\u2264", r"\\le "),
        ("\u2265", r"\\ge "),
        ("\u2260", r"\\ne "),
        ("\u00f7", "/"),
        ("[\u00d7\u00b7]", r"\\cdot "),
        (r"(\d)[eE]([+-]?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![\d.])(\d{1,3})[ '](?=\d{3}(?!\d))", r"\1"),
        (r"\^(\d{2,})", r"^{\1}"),
        (r"(?:,\s*)?\\(?:text|mathrm)\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|,?\s+(?:and|or)\s+", ", "),
        (r"\s*[;\u548c\u4e0e\u6216]\s*|,?\s+(?:und|oder|et|ou)\s+", ", "),
        (r"(?<![\d.}\\])(\d{1,9})\s*\\frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\}", r"(\1+\\frac{\2}{\3})"),
        (r"^\s*[a-zA-Z]\s*\\in(?![a-zA-Z])", ""),
        (rf"\\(?:text|mathrm|operatorname\*?)\s*\{{\s*({_FUNCTION_NAMES})\s*\}}", r"\\\1 "),
        (rf"(?<![\\a-zA-Z])({_FUNCTION_NAMES}|pi|infty|cup|cap)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:infinity|oo)(?![a-zA-Z])", r"\\infty "),
    )
]
_CASES = re.compile(r"\\begin\s*\{(cases|aligned|align\*?|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_SIGNS = re.compile(r"\\([pm])[pm](?![a-zA-Z])")
_SEGMENTS = re.compile(r"(^|[,;])\s*([A-Z]{2,4})\s*(?==)")
_OPENING = re.compile(r"\\.|[({\[|]|[)}\]]", re.DOTALL)
_DEEPEST = 12
_COMPUTED = re.compile(r"\\(?:binom|Gamma|gamma|gcd|lcm|det|operatorname|zeros|ones|eye|rank|norm)(?![a-zA-Z])")
_LARGE = re.compile(r"\d{5}|\d\s*\}?\s*\^|!")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_STOP_WORDS = words(
    "it is the to of so we an in on at by or if as be do he she you has had was get for not are but and all its let say per then"
)
_NO_ARITHMETIC = re.compile(r"\d+\s*[-/]\s*\d+\s*[-/]\s*\d+|\d+-\d+|\d+(?:\.\d+){2,}|\d+\s+\d.*", re.DOTALL)


@lru_cache(maxsize=256)
def read(text: str) -> sympy.Basic:
    """The sympy object that the whole text, without LaTeX delimiters, represents. None for prose and unparsable text."""
    if len(text) > LONGEST:
        return None
    text = _without_name(upright(unified(text)))
    if stated := congruence(text):
        return _congruent(*stated)
    text = familiar(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _SEGMENTS.sub(r"\1 S_{\2} ", _system(text))
    if _SIGNS.search(text):
        text = ", ".join(
            _SIGNS.sub(lambda sign, signs=signs: signs[sign[1] == "m"], text)  # type: ignore[misc]
            for signs in ("+-", "-+")
        )
    named = _WORD.findall(_COMMAND.sub(" ", text))
    if not text.strip() or any(len(word) > 3 or word.lower() in _STOP_WORDS for word in named) or _is_laborious(text):
        return None
    found = parse(f"${text}$", _CONFIG, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    return found[0] if found and isinstance(found[0], sympy.Basic | sympy.MatrixBase) else None


def _congruent(left: str, right: str, modulus: int) -> sympy.Basic:
    """A congruence as an unknown function of its residue, equal only to the same. A symbol on the left only names the residue."""
    residue, of = read(right), read(left) if left and not sides.symbol(left) else sympy.S.Zero
    if not isinstance(residue, sympy.Integer) or not isinstance(of, sympy.Expr):
        return None
    return sympy.Function("congruent")(of, residue % modulus, sympy.Integer(modulus))


def is_ambiguous(text: str) -> bool:
    """Whether a label that looks like arithmetic may instead be a date, a range, a version or several numbers."""
    return _NO_ARITHMETIC.fullmatch(text.strip()) is not None


def equals_number(found: sympy.Basic, value: Fraction, places: int | None) -> bool:
    """Whether an object of `read` has the value, which may be rounded to that many decimals (see `quantity`)."""
    found = relations.value(found)
    if isinstance(found, sympy.Expr):
        return compare.equals_decimal(found, value, places)
    return relations.equal(number(value), found)


def may_be_radians(found: sympy.Basic) -> bool:
    """Whether an object of `read` is a value with pi or an inverse function, as angles in radians have it."""
    found = relations.value(found)
    return isinstance(found, sympy.Expr) and bool(found.has(sympy.pi, sympy.asin, sympy.acos, sympy.atan))


def radians(degrees: sympy.Basic) -> sympy.Basic:
    """An angle in radians."""
    return sympy.Mul(relations.value(degrees), sympy.pi, sympy.Rational(1, 180))


def number(value: Fraction) -> sympy.Basic:
    """An exact value as a sympy number."""
    return sympy.Rational(value.numerator, value.denominator)


def _without_name(text: str) -> str:
    """The right side of an equation whose left side is in words, or a geometric name, neither of which the parser knows."""
    left, *right = sides.parts(text)
    shown = plain(left)
    return (
        "=".join(right)
        if right and not sides.symbol(shown) and re.search(r"[^\W\d_]", shown) and sides.names(shown) and "(" not in shown
        else text
    )


def _system(text: str) -> str:
    """The rows of a system of equations as a list."""
    match = _CASES.search(text)
    if match is None or "=" not in match[2]:
        return text
    return ", ".join(row.replace("&", " ").strip(" ,") for row in match[2].split(r"\\") if row.strip())


def _is_laborious(text: str) -> bool:
    """Whether the parser would need long for text: nested brackets, or functions of large numbers, which it computes at once."""
    depth = deepest = 0
    for bracket in _OPENING.finditer(text):
        depth += (bracket[0] in "({[") - (bracket[0] in ")}]")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST or text.count("|") > _DEEPEST:
        return True
    return _COMPUTED.search(text) is not None and _LARGE.search(text) is not None
