r"""Reads and compares expressions, sets, intervals and matrices with math-verify.

Invariant: prose, and text that does not parse completely as LaTeX, is not a formula. Only worker processes, which have a deadline, import
this module: sympy may need unbounded time.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from polyreme_reward.rules.quantity import ROUNDED

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every call that its own timeouts are off

LONGEST = 2000
"""Maximum characters of a formula that is parsed."""

_FLOAT_ERROR = sympy.Rational(1, 10**12)  # relative error of decimal arithmetic

_CONFIG = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
        ),
    )
]
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\[dtc]frac\b", r"\\frac"),
        ("\u221a", r"\\sqrt "),
        ("\u221e", r"\\infty "),
        ("\u03c0", r"\\pi "),
        ("\u2264", r"\\le "),
        ("\u2265", r"\\ge "),
        ("\u00b1", r"\\pm "),
        ("[\u00d7\u00b7]", r"\\cdot "),
        ("\u00b2", "^2"),
        ("\u00b3", "^3"),
        ("\u2212", "-"),
        (r"(\d)[eE]([+-]?\d{1,4})(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))", ""),
        (r"\^(\d{2,})", r"^{\1}"),
        (r"(?:,\s*)?\\(?:text|mathrm)\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|,?\s+(?:and|or)\s+", ", "),
        (r"^\s*[a-zA-Z]\s*(?:\\in\b|=(?=.*\\pm\b))", ""),
        (r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|cup|cap)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:infinity|oo)(?![a-zA-Z])", r"\\infty "),
    )
]
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_EITHER_SIGN = re.compile(r"\\pm\b")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_STOP_WORDS = frozenset(
    [
        "it",
        "is",
        "the",
        "to",
        "of",
        "so",
        "we",
        "an",
        "in",
        "on",
        "at",
        "by",
        "or",
        "if",
        "as",
        "be",
        "do",
        "he",
        "she",
        "you",
        "has",
        "had",
        "was",
        "get",
        "for",
        "not",
        "are",
        "but",
        "and",
        "all",
        "its",
        "let",
        "say",
        "per",
        "then",
    ]
)
_NO_ARITHMETIC = re.compile(r"\d+\s*[-/]\s*\d+\s*[-/]\s*\d+|\d+-\d+|\d+(?:\.\d+){2,}|\d+\s+\d.*", re.DOTALL)


@lru_cache(maxsize=256)
def read(text: str) -> Any:
    """The sympy object that the whole text, without LaTeX delimiters, represents. None for prose and for text that cannot be parsed."""
    if len(text) > LONGEST:
        return None
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    if _EITHER_SIGN.search(text):
        text = ", ".join(_EITHER_SIGN.sub(sign, text) for sign in "+-")
    words = _WORD.findall(_COMMAND.sub(" ", text))
    if not text.strip() or any(len(word) > 3 or word.lower() in _STOP_WORDS for word in words):
        return None
    found = parse(f"${text}$", _CONFIG, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    return found[0] if found else None


def is_ambiguous(text: str) -> bool:
    """Whether a label that looks like arithmetic may instead be a date, a range, a version or several numbers."""
    return _NO_ARITHMETIC.fullmatch(text.strip()) is not None


def equal(gold: Any, answer: Any) -> bool:
    """Whether two objects of `read` or `number` are mathematically equal."""
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def equals_number(found: Any, value: Fraction, places: int | None) -> bool:
    """Whether an object of `read` has the value. If `places` is at least ROUNDED, the value may be rounded to that many decimals."""
    found = found.rhs if isinstance(found, sympy.Eq) else found
    if not isinstance(found, sympy.Expr) or not found.is_number:
        return equal(number(value), found)
    difference = found.doit() - number(value)
    if not difference.is_finite or not difference.is_real:
        return False
    if places is not None and places >= ROUNDED:
        return bool(abs(difference) <= sympy.Rational(1, 2) / sympy.Integer(10) ** places)
    if difference.has(sympy.Float):
        return bool(abs(difference) <= abs(number(value)) * _FLOAT_ERROR)
    return bool(difference.equals(0))


def number(value: Fraction) -> Any:
    """An exact value as a sympy number."""
    return sympy.Rational(value.numerator, value.denominator)
