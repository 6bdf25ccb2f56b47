r"""Mathematical equality. Used in worker processes only, since formulas may need a second.

Invariant: every comparison is bounded in size and in time. An answer beyond the bounds scores 0. A label beyond them, one that
cannot be read, or one that does not equal itself, is an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import quantity, sides
from polyreme_reward.rules.budget import OverBudget, limited
from polyreme_reward.rules.notation import GLUED
from polyreme_reward.rules.quantity import Quantity
from polyreme_reward.rules.response import ASIDE, answer_text, marked, required_label, without_denied
from polyreme_reward.rules.spelling import plain, undelimited, unified, upright
from polyreme_reward.rules.units import Unit, simple, unit

_TAIL = 20_000
_INCOMPARABLE = (
    OverBudget,
    ArithmeticError,
    AttributeError,
    IndexError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_SECONDS = 0.6
"""Processor time after which an answer is wrong, and a label is an error. Nearly all comparisons take a hundredth of it."""
_ONE_LINE = 200  # maximum characters of a response that is an answer as a whole
_WORDS = re.compile(r"[^\W\d_][^\W\d_'-]*(?: [^\W\d_][^\W\d_'-]*){0,3}")
_SHORT_WORDS = frozenset(["yes", "no", "on", "off", "odd", "up", "down", "in", "out", "one", "two", "ten", "red", "blue"])
_MISSING = frozenset(("none", "null", "nan", "n/a", "na", "unknown", "todo", "tbd"))
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)  # or a time of day
_DATE = re.compile(rf"{quantity.MONTH}\s+\d{{1,2}}(?:,?\s+\d{{4}})?", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox)\s*\{(?P<text>[^{}]+)\}|(?<=[\s}])(?P<plain>[a-zA-Z]{2,}))(?P<power>\s*\^\s*\{?[23]\}?)?\s*$"
)
_OPTION = re.compile(r"\A\s*(?:\\text(?:bf)?\s*\{\s*\([A-E]\)\s*\}|\([A-E]\))(?:\\[ ,;:]|\s|~|\\q?quad)+(?=[^\s+*/=^-]|-?\d)")
_SETS = "\u211d\u2124\u2115\u211a\u2102"
_GLUED = re.compile(rf"(?:{GLUED})[xyz]")  # sinx
_DEGREE, _RADIAN = unit("degree"), unit("radian")
_UNIT_BESIDE = re.compile(r"(?<=\d)\$\s*\$?(?:\\(?:text|mathrm)\s*\{\s*)?([a-zA-Z/]+)\}?\$?\^\{?[23]\}?\$?")  # $42$ cm$^2$
_FORMULA = re.compile(r"\$\$.+?\$\$|(?<!\\)\$(?! )[^$\n]+(?<! )\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)


@dataclass(frozen=True)
class _Words:
    """An answer in words, a ratio, a time or a date. Compared as text."""

    text: str


@dataclass(frozen=True)
class _Formula:
    """A sympy object and its unit, or None when no unit is stated."""

    object: object
    unit: Unit | None


_Read = Quantity | _Words | _Formula


def math(after: str | None = None, before: str | None = None) -> Callable[[Item], float]:
    r"""1 if the response's answer is mathematically equal to the label (math-verify), else 0.

    The answer is the content of the last \boxed{...}; without a box, the text after the last "####" or "answer is"; otherwise the
    last formula or number. A later correction ("no, 42") replaces it. Text in <think>...</think> does not count. A missing label,
    prose, a date or a range cannot be judged and is an error. A response without a readable answer scores 0.

    Args:
        after: search only after the first occurrence of this marker. A response without it scores 0.
        before: search only before the next occurrence of this marker. A response without it scores 0.
    """
    try:
        import math_verify  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        raise ConfigError("the package math-verify", "none", "Install it: pip install 'polyreme-reward[math]'.") from None

    def score(item: Item) -> float:
        label = required_label(item)
        gold = _gold(label)
        text = answer_text(item, after, before)
        try:
            with limited(_SECONDS):
                answer = None if text is None else _answer(text[-_TAIL:], gold)
                if isinstance(gold, _Formula) and isinstance(answer, Quantity) and answer.unit is not None:
                    gold = quantity.read(plain(label), letters=True) or gold
                return 0.0 if answer is None else float(_equal(gold, answer))
        except _INCOMPARABLE:  # sympy has no value for a response such as 1e400!
            return 0.0

    return score


@lru_cache(maxsize=64)
def _gold(label: str) -> _Read:
    """The meaning of the label. Raises RewardError when it cannot be judged."""
    from polyreme_reward.rules import formula

    named = marked(label, words=True)
    text = label if named is None else named
    shown = plain(text)
    gold = None
    try:
        with limited(_SECONDS):
            if shown.casefold() not in _MISSING and (not formula.is_ambiguous(shown) or quantity.read(shown) is not None):
                gold = _read(text)
            judged = gold is not None and _equal(gold, gold)
    except _INCOMPARABLE:
        judged = False
    if gold is None or not judged:
        raise RewardError(f"expected a label that can be judged as mathematics; found {label[:200]!r}")
    return gold


def _answer(text: str, gold: _Read) -> _Read | None:
    """The answer in the response, or None when there is no readable one."""
    named = marked(text, words=isinstance(gold, _Words))
    if named is None and isinstance(gold, _Formula):  # such as p - q, which has no digit
        named = marked(text, words=True)
    if named is None and "\n" not in text.strip() and len(text) < _ONE_LINE:
        named = without_denied(text)
    whole = None if named is None else _read(named)
    if named is not None and isinstance(gold, Quantity) and isinstance(whole, _Formula) and whole.unit is None:
        whole = quantity.read(plain(named), letters=True) or whole  # 5m, 10 N
    return whole if whole is not None else _last(text if named is None else named)


def _last(text: str) -> _Read | None:
    """The last formula or number in prose."""
    text = _UNIT_BESIDE.sub(r" \\text{\1}^2$", unified(text))
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return quantity.last_in(text[:-_ONE_LINE] + ASIDE.sub("", text[-_ONE_LINE:]))[0]
    number, place = quantity.last_in(text[formulas[-1].end() :])
    return number if place >= 0 else _read(formulas[-1][0])


def _read(text: str) -> _Read | None:
    """The meaning of the whole text: a quantity, a ratio, words, a formula, or None."""
    from polyreme_reward.rules import formula

    text = _OPTION.sub("", text)
    shown = plain(text)
    if (number := quantity.read(shown)) is not None:
        return number
    if _RATIO.fullmatch(shown) or _DATE.fullmatch(shown):
        return _Words(re.sub(r"[\s.,]", "", shown).casefold())
    if (words := _words(shown)) is not None:
        return words
    text, measured = _without_unit(undelimited(unified(text)).removesuffix("."))
    if measured is None:
        text, measured = _without_unit(upright(text))
    if measured is not None and (number := quantity.read(plain(text))) is not None and number.unit is None:
        return replace(number, unit=measured)
    found = formula.read(text)
    return None if found is None else _Formula(found, measured)


def _without_unit(text: str) -> tuple[str, Unit | None]:
    """A formula without its trailing unit, and that unit."""
    match = _UNIT.search(text)
    if match is None or not text[: match.start()].strip():
        return text, None
    name = (match["text"] or match["plain"]).strip()
    if simple(name) is None and (match["text"] is None or len(name) == 1):
        return text, None
    return text[: match.start()], unit((match["text"] or match["plain"]).strip() + (match["power"] or ""))


def _words(text: str) -> _Words | None:
    """The text as words, or None when it may be a formula such as ab or pi."""
    inner = " ".join(text.strip(" .()[]").split())
    if not _WORDS.fullmatch(inner):
        return None
    if len(inner) == 1:
        return _Words(inner) if inner.isupper() and inner not in _SETS else None
    if _GLUED.fullmatch(inner) or not sides.FUNCTIONS.isdisjoint(inner.lower().split()):  # sin x
        return None
    is_word = inner[0].isupper() or len(inner) > 3 or inner.lower() in _SHORT_WORDS
    return _Words(inner.casefold()) if is_word and inner.lower() not in ("infinity", "sqrt") else None


def _equal(gold: _Read, answer: _Read) -> bool:
    from polyreme_reward.rules import formula, relations

    if isinstance(gold, _Words) or isinstance(answer, _Words):
        return gold == answer
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return gold.equals(answer)
    for one, other in ((gold, answer), (answer, gold)):
        if (
            one.unit == _DEGREE
            and isinstance(other, _Formula)
            and other.unit in (None, _RADIAN)
            and formula.may_be_radians(other.object)
        ):
            angle = one.object if isinstance(one, _Formula) else formula.number(Fraction(one.value))
            return relations.equal(formula.radians(angle), other.object)
    if gold.unit is not None and answer.unit is not None:
        if gold.unit.dimension != answer.unit.dimension:
            return False
        if gold.unit != answer.unit:
            gold, answer = _in_base_units(gold), _in_base_units(answer)
    for number, other in ((gold, answer), (answer, gold)):
        if isinstance(number, Quantity) and isinstance(other, _Formula):
            return not isinstance(number.value, str) and formula.equals_number(other.object, number.value, number.places)
    return isinstance(gold, _Formula) and isinstance(answer, _Formula) and relations.equal(gold.object, answer.object)


def _in_base_units(found: Quantity | _Formula) -> Quantity | _Formula:
    from polyreme_reward.rules import formula

    factor = found.unit.factor if found.unit is not None else Fraction(1)
    if isinstance(found, _Formula):
        return _Formula(found.object * formula.number(factor), None)
    return found if isinstance(found.value, str) else Quantity(found.value * factor)
