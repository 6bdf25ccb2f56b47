r"""Evaluates sympy expressions at points: exactly where all is rational, else to many digits.

Invariant: every step checks the size of its result before it computes it, so the time and memory of an evaluation are bounded.
sympy itself computes 9^{99^9}, since it has no such check.
"""

import functools
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import comb, factorial, isqrt, log2
from typing import TypeAlias

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from mpmath import mp
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

BITS = 1 << 17
"""Maximum bits of the numerator or denominator of a value."""

_EXPONENT = 1 << 24  # maximum bits of the magnitude of an inexact value
_TERMS = 1_000
_FACTORIAL = 5_000

Inexact: TypeAlias = "mpmath.mpf | mpmath.mpc"
"""A number of mpmath."""

Value: TypeAlias = "Fraction | Inexact"
"""An exact number, or an inexact one."""


class NoValue(ArithmeticError):
    """The expression has no value at this point, or one that is too large to compute."""


class Valuation:
    """The values of expressions at one point, which gives a value to every variable.

    Args:
        number: number of the point.

    Attributes:
        real: whether no logarithm or root of a negative number has occurred.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._bound: dict[sympy.Symbol, Fraction] = {}
        self._values: dict[sympy.Basic, Value] = {}
        self.real = True

    def value(self, expr: sympy.Basic) -> Value:
        """The value of an expression at the working precision of mpmath. Raises NoValue."""
        if expr in self._values:
            return self._values[expr]
        found = self._compute(expr)
        if isinstance(found, Fraction):
            if max(found.numerator.bit_length(), found.denominator.bit_length()) > BITS:
                raise NoValue("too large")
        elif mpmath.isnan(found) or (not mpmath.isinf(found) and abs(mpmath.mag(found) if found else 0) > _EXPONENT):
            raise NoValue("not a number, or too large")
        if not self._bound:
            self._values[expr] = found
        return found

    def _compute(self, expr: sympy.Basic) -> Value:
        if expr in self._bound:
            return self._bound[expr]
        for kind, compute in _BY_KIND.items():
            if isinstance(expr, kind):
                return compute(self, expr)
        function = _FUNCTIONS.get(type(expr).__name__)
        if function is None:
            raise NoValue(type(expr).__name__)
        return function(*(inexact(self.value(arg)) for arg in expr.args))

    def variable(self, expr: sympy.Basic) -> Value:
        """An arbitrary value of a variable, or of a function that is not known. Valuations 0 to 3 have positive values only."""
        name = f"{expr.func}({[str(self.value(arg)) for arg in expr.args]})" if isinstance(expr, AppliedUndef) else str(expr)
        if name == "i":
            return mpmath.mpc(0, 1)
        code = zlib.crc32(f"{name} {self._number}".encode())
        over, under = 2 + code % 97, 101 + (code >> 8) % 30
        value = Fraction(over, under) if self._number % 2 else Fraction(under, over) % 7 + Fraction(1, over)
        return -value if self._number > 3 and (code >> 16 & 1 or self._number == 7) else value

    def sum(self, expr: sympy.Basic) -> Value:
        return functools.reduce(_plus, map(self.value, expr.args), Fraction(0))

    def product(self, expr: sympy.Basic) -> Value:
        return functools.reduce(_times, map(self.value, expr.args), Fraction(1))

    def power(self, expr: sympy.Basic) -> Value:
        base, exponent = self.value(expr.args[0]), self.value(expr.args[1])
        if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
            return _integer_power(base, exponent.numerator)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            odd = exponent.denominator % 2 == 1 and not expr.args[1].free_symbols  # the cube root of -8 is -2
            if base < 0 and odd:
                root = self._root(-base, exponent)
                return -root if exponent.numerator % 2 else root
            if base >= 0:
                return self._root(base, exponent)
        whole = isinstance(exponent, Fraction) and exponent.denominator == 1
        base, exponent = inexact(base), inexact(exponent)
        if not whole and mpmath.im(base) == 0 and mpmath.re(base) < 0:
            self.real = False
        if base and not mpmath.isinf(base) and abs(exponent * (mpmath.mag(base) + 2)) > _EXPONENT:
            raise NoValue("too large")
        return mpmath.power(base, exponent)

    def _root(self, base: Fraction, exponent: Fraction) -> Value:
        if not base and exponent < 0:
            raise NoValue("division by zero")
        if exponent.denominator == 2 and max(base.numerator, base.denominator).bit_length() < 4096:
            over, under = isqrt(base.numerator), isqrt(base.denominator)
            if over * over == base.numerator and under * under == base.denominator:
                return _integer_power(Fraction(over, under), exponent.numerator)
        if base and abs(exponent) * abs(base.numerator.bit_length() - base.denominator.bit_length() + 1) > _EXPONENT:
            raise NoValue("too large")
        return mpmath.power(inexact(base), inexact(exponent))

    def log(self, expr: sympy.Basic) -> Value:
        number, *base = map(self.value, expr.args)
        if not number:
            raise NoValue("the logarithm of zero")
        if mpmath.im(inexact(number)) == 0 and mpmath.re(inexact(number)) < 0:
            self.real = False
        if base and base[0] in (0, 1):
            raise NoValue("a logarithm without a base")
        return mpmath.log(inexact(number)) / mpmath.log(inexact(base[0])) if base else mpmath.log(inexact(number))

    def rounded(self, expr: sympy.Basic) -> Value:
        number = self.value(expr.args[0])
        up = isinstance(expr, sympy.ceiling)
        if isinstance(number, Fraction):
            return Fraction(-(-number // 1) if up else number // 1)
        if mpmath.im(number) or mpmath.isinf(number) or mpmath.mag(number) > mp.prec // 2:
            raise NoValue("rounding of a number that is not real, or not known well enough")
        nearest = int(mpmath.nint(number))
        if abs(number - nearest) < mpmath.mpf(2) ** (-mp.prec // 2):
            return Fraction(nearest)
        return Fraction(int(mpmath.ceil(number) if up else mpmath.floor(number)))

    def extreme(self, expr: sympy.Basic) -> Value:
        values = [self.value(arg) for arg in expr.args]
        if any(mpmath.im(inexact(value)) for value in values):
            raise NoValue("an order of complex numbers")
        return (max if isinstance(expr, sympy.Max) else min)(values, key=inexact)

    def factorial(self, expr: sympy.Basic) -> Value:
        number = self.value(expr.args[0])
        if isinstance(number, Fraction) and number.denominator == 1 and number >= 0:
            if number > _FACTORIAL:
                raise NoValue("too large")
            return Fraction(factorial(int(number)))
        return _gamma(inexact(number) + 1)

    def binomial(self, expr: sympy.Basic) -> Value:
        over, under = map(self.value, expr.args)
        if all(isinstance(each, Fraction) and each.denominator == 1 for each in (over, under)) and over >= 0:
            under = max(min(under, over - under), Fraction(-1))
            if under < 0:
                return Fraction(0)
            if under * over.numerator.bit_length() > BITS:
                raise NoValue("too large")
            return Fraction(comb(int(over), int(under)))
        top, bottom = inexact(over), inexact(under)
        return _gamma(top + 1) / (_gamma(bottom + 1) * _gamma(top - bottom + 1))

    def series(self, expr: sympy.Basic) -> Value:
        """A sum or product with few terms."""
        if len(expr.limits) != 1 or len(expr.limits[0]) != 3:
            raise NoValue("several indices")
        index, *ends = expr.limits[0]
        low, high = map(self.value, ends)
        if any(not isinstance(end, Fraction) or end.denominator != 1 for end in (low, high)) or high - low > _TERMS:
            raise NoValue("too many terms")
        join, total = (_plus, Fraction(0)) if isinstance(expr, sympy.Sum) else (_times, Fraction(1))
        outer = self._bound
        try:
            for number in range(int(low), int(high) + 1):
                self._bound = {**outer, index: Fraction(number)}
                total = join(total, self.value(expr.function))
                if isinstance(total, Fraction) and total.denominator.bit_length() > BITS:
                    raise NoValue("too large")
        finally:
            self._bound = outer
        return total

    def closed(self, expr: sympy.Basic) -> Value:
        """The value of an integral, limit or derivative that sympy finds."""
        if isinstance(expr, sympy.Derivative) and isinstance(expr.expr, sympy.Symbol | AppliedUndef):  # dy/dx is not 0
            return self.variable(expr)
        done = expr.doit()
        if done.has(type(expr)):
            raise NoValue(f"no closed form of {type(expr).__name__}")
        return self.value(done)


def inexact(value: Value) -> Inexact:
    """A value as a number of mpmath."""
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def decimal(number: sympy.Float) -> Fraction:
    """The decimal that was written."""
    return Fraction(str(number))


def _plus(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        if left.denominator.bit_length() + right.denominator.bit_length() > BITS:
            raise NoValue("too large")
        return left + right
    return inexact(left) + inexact(right)


def _times(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        for part in ("numerator", "denominator"):
            if getattr(left, part).bit_length() + getattr(right, part).bit_length() > 2 * BITS:
                raise NoValue("too large")
        return left * right
    return inexact(left) * inexact(right)


def _integer_power(base: Fraction, exponent: int) -> Value:
    if exponent < 0 and not base:
        raise NoValue("division by zero")
    if abs(base.numerator) == base.denominator:
        return base if exponent % 2 else Fraction(1)
    if not base:
        return Fraction(0 if exponent else 1)
    if exponent.bit_length() > 64 or abs(exponent) * log2(max(abs(base.numerator), base.denominator)) > BITS:
        raise NoValue("too large")
    return base**exponent


def _gamma(number: Inexact) -> Inexact:
    if abs(number) > _FACTORIAL:
        raise NoValue("too large")
    try:
        return mpmath.gamma(number)
    except ValueError:
        raise NoValue("a pole of the gamma function") from None


def _exp(number: Inexact) -> Inexact:
    if not mpmath.isinf(number) and abs(number) > _EXPONENT // 2:
        raise NoValue("too large")
    return mpmath.exp(number)


def _bounded(name: str, periodic: bool = False) -> Callable[[Inexact], Inexact]:
    """A function of mpmath for arguments that are not too large; a periodic one is large only for imaginary ones."""

    def compute(number: Inexact) -> Inexact:
        if (periodic and (mpmath.isinf(number) or mpmath.mag(number) > 1000)) or abs(
            mpmath.im(number) if periodic else number
        ) > _EXPONENT // 4:
            raise NoValue("too large")
        return getattr(mpmath, name)(number)

    return compute


def _remainder(point: Valuation, expr: sympy.Basic) -> Value:
    left, right = map(point.value, expr.args)
    if not isinstance(left, Fraction) or not isinstance(right, Fraction) or not right:
        raise NoValue("a remainder of numbers that are not rational")
    return left % right


_BY_KIND: Mapping[type[sympy.Basic], Callable[[Valuation, sympy.Basic], Value]] = {
    sympy.Rational: lambda point, expr: Fraction(int(expr.p), int(expr.q)),
    sympy.Float: lambda point, expr: decimal(expr),
    sympy.Symbol: Valuation.variable,
    sympy.Add: Valuation.sum,
    sympy.Mul: Valuation.product,
    sympy.Pow: Valuation.power,  # before exp, since sympy counts E**x among its instances
    sympy.exp: lambda point, expr: _exp(inexact(point.value(expr.args[0]))),
    sympy.UnevaluatedExpr: lambda point, expr: point.value(expr.args[0]),
    type(sympy.pi): lambda point, expr: +mpmath.pi,
    type(sympy.E): lambda point, expr: +mpmath.e,
    type(sympy.I): lambda point, expr: mpmath.mpc(0, 1),
    type(sympy.oo): lambda point, expr: mpmath.inf,
    type(-sympy.oo): lambda point, expr: -mpmath.inf,
    sympy.log: Valuation.log,
    sympy.Abs: lambda point, expr: abs(point.value(expr.args[0])),
    sympy.floor: Valuation.rounded,
    sympy.ceiling: Valuation.rounded,
    sympy.Max: Valuation.extreme,
    sympy.Min: Valuation.extreme,
    sympy.Mod: _remainder,
    sympy.factorial: Valuation.factorial,
    sympy.binomial: Valuation.binomial,
    sympy.Sum: Valuation.series,
    sympy.Product: Valuation.series,
    sympy.Integral: Valuation.closed,
    sympy.Limit: Valuation.closed,
    sympy.Derivative: Valuation.closed,
    AppliedUndef: Valuation.variable,
}
_FUNCTIONS: Mapping[str, Callable[..., Inexact]] = {
    **{name: _bounded(name, periodic=True) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{name: _bounded(name) for name in ("sinh", "cosh", "tanh", "coth", "sech", "csch")},
    **{
        name: _bounded(name)
        for name in ("asin", "acos", "atan", "acot", "asec", "acsc", "asinh", "acosh", "atanh", "acoth", "asech", "acsch", "erf")
    },
    "gamma": _gamma,
    "re": mpmath.re,
    "im": mpmath.im,
    "conjugate": mpmath.conj,
    "arg": mpmath.arg,
    "sign": mpmath.sign,
}
