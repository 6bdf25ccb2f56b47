r"""Compares expressions by their values at some points.

Invariant: rational values are compared exactly and others relatively, so no difference is too small to count. An expression that
cannot be computed within the limits of `evaluate` is equal only to itself.
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]

from polyreme_reward.rules import quantity
from polyreme_reward.rules.evaluate import NoValue, Valuation, Value, decimal, inexact

_DIGITS = 50
_MORE_DIGITS = 220
_AGREED = 150
"""Digits that must agree of the values to _MORE_DIGITS. The rest is for errors of rounding. Relative to the value to _DIGITS,
which is itself such an error where the exact value is zero."""
_POINTS = 8
_SHARE = sympy.UnevaluatedExpr(sympy.Rational(1, 100))


class _Twice(NamedTuple):
    """A value to _DIGITS and to _MORE_DIGITS. Digits that differ are an error of rounding."""

    short: Value
    long: Value

    def times(self, other: "_Twice") -> "_Twice":
        return _Twice(*(_product(*pair) for pair in zip(self, other, strict=True)))

    def near(self, other: "_Twice") -> bool:
        if isinstance(self.long, Fraction) and isinstance(other.long, Fraction):
            return self.long == other.long
        with mpmath.workdps(_MORE_DIGITS):
            left, right = inexact(self.long), inexact(other.long)
            if mpmath.isinf(left) or mpmath.isinf(right):
                return bool(left == right)
            size = max(abs(inexact(self.short)), abs(inexact(other.short)))
            return bool(abs(left - right) <= size * mpmath.mpf(10) ** -_AGREED)


_ZERO = _Twice(Fraction(0), Fraction(0))


def same(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Whether two expressions have the same values: wherever both are real, else wherever all variables are positive. A decimal
    may be rounded as in `quantity`, and a percent sign may be omitted."""
    if left == right:
        return not left.has(sympy.zoo, sympy.nan)
    for number, exact in ((left, right), (right, left)):
        if isinstance(number, sympy.Float) and not exact.has(sympy.Float):
            return equals_decimal(exact, decimal(number), _places(number))
    if _agree(left, right):
        return True
    shares = [expr.args[0] if isinstance(expr, sympy.Mul) and expr.args[1:] == (_SHARE,) else expr for expr in (left, right)]
    return shares != [left, right] and _agree(*shares)


def equals_decimal(expr: sympy.Basic, value: Fraction, places: int | None) -> bool:
    """Whether a constant has the value, which may be rounded if it has as many decimals as `quantity` demands."""
    if _agree(expr, sympy.Rational(value.numerator, value.denominator)):
        return True
    allowed = quantity.tolerance(value, places)
    if not allowed or expr.free_symbols:
        return False
    try:
        with mpmath.workdps(_DIGITS):
            difference = inexact(Valuation(0).value(expr)) - inexact(value)
            return bool(abs(difference) <= inexact(allowed))
    except NoValue:
        return False


def factor(left: sympy.Basic, right: sympy.Basic) -> sympy.Basic:
    """The constant by which two expressions differ, or None when there is none, or when one is zero everywhere."""
    pairs = _pairs(left, right)
    given = next((pair for pair in pairs if not any(each.near(_ZERO) for each in pair)), None)
    if given is None or not all(one.times(given[1]).near(other.times(given[0])) for one, other in pairs):
        return None
    return inexact(given[0].short) / inexact(given[1].short)


def is_zero(expr: sympy.Basic) -> bool:
    """Whether an expression is zero everywhere."""
    return _agree(expr, sympy.S.Zero)


def difference(left: sympy.Basic, right: sympy.Basic) -> sympy.Basic:
    """left - right, not evaluated."""
    return sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False)


def _agree(left: sympy.Basic, right: sympy.Basic) -> bool:
    pairs = _pairs(left, right)
    return bool(pairs) and all(one.near(other) for one, other in pairs)


def _pairs(left: sympy.Basic, right: sympy.Basic) -> list[tuple[_Twice, _Twice]]:
    """The values of both at the same points."""
    variables = {str(symbol) for symbol in left.free_symbols | right.free_symbols} - {"i"}
    found = []
    for number in range(_POINTS if variables else 1):
        one, other = _at(left, number), _at(right, number)
        if one is not None and other is not None:
            found.append((one[0], other[0], one[1] and other[1], number))
    real = [(one, other) for one, other, is_real, _ in found if is_real]
    return real or [(one, other) for one, other, _, number in found if number < 4]


@lru_cache(maxsize=1024)
def _at(expr: sympy.Basic, number: int) -> tuple[_Twice, bool] | None:
    """The value at a point, and whether it stays real. None when it has none."""
    point, precise = Valuation(number), Valuation(number)
    try:
        with mpmath.workdps(_DIGITS):
            short = point.value(expr)
        if isinstance(short, Fraction):
            return _Twice(short, short), point.real
        with mpmath.workdps(_MORE_DIGITS):
            return _Twice(short, precise.value(expr)), point.real
    except NoValue:
        return None


def _product(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left * right
    with mpmath.workdps(_MORE_DIGITS):
        return inexact(left) * inexact(right)


def _places(number: sympy.Basic) -> int:
    _, point, decimals = str(number).partition(".")
    return len(decimals.rstrip("0")) if point and "e" not in decimals else 0
