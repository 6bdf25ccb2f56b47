"""The tool `calculator`: exact arithmetic in bounded time.

Invariant: only numbers and the operations below are evaluated, and no number grows beyond _BITS. Pure.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

_CHARS = 1000
_BITS = 4096
_DEPTH = 50
_DIGITS = 1000


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        return Fraction(repr(float(base) ** float(exponent)))
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > _BITS:
        raise ValueError(f"a power is too large: more than {_BITS} bits")
    return base ** int(exponent)


def _round(number: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if abs(digits) > _DIGITS:
        raise ValueError(f"expected at most {_DIGITS} digits")
    return Fraction(round(number, int(digits)))


def _root(number: Fraction) -> Fraction:
    if number < 0:
        raise ValueError("the square root of a negative number")
    whole = math.isqrt(number.numerator), math.isqrt(number.denominator)
    exact = Fraction(*whole)
    return exact if exact * exact == number else Fraction(repr(math.sqrt(number)))


_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {"abs": abs, "max": max, "min": min, "round": _round, "sqrt": _root}


def calculate(expression: str) -> int | float:
    """The value of an expression: decimal numbers with + - * / // % ** ^, parentheses, and abs, max, min, round and sqrt.

    Arithmetic is exact, so 0.1 + 0.2 is 0.3. A value that is not whole is rounded to a float at the end.

    Raises:
        ValueError: it is no such expression, or a number would be too large.
        ZeroDivisionError: as it says.
    """
    if len(expression) > _CHARS:
        raise ValueError(f"an expression of more than {_CHARS} characters")
    text = expression.strip().replace("^", "**")  # in Python, ^ binds less than +
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"expected an arithmetic expression such as (3 + 4) * 2.5; found {expression[:100]!r}") from error
    try:
        value = _value(tree.body, text, _DEPTH)
        return int(value) if value.denominator == 1 else float(value)
    except OverflowError:
        raise ValueError("a number is too large for a root or a decimal fraction") from None


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if not depth:
        raise ValueError(f"an expression that is nested more than {_DEPTH} times")

    def inner(each: ast.expr) -> Fraction:
        return _value(each, text, depth - 1)

    match node:
        case ast.Constant(value=int() | float()) if type(node.value) is not bool:
            return _bounded(_number(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=ast.USub()):
            return -inner(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return inner(node.operand)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](inner(node.left), inner(node.right)))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS and node.args:
            return _bounded(_FUNCTIONS[name](*map(inner, node.args)))
    found = ast.get_source_segment(text, node) or ""
    raise ValueError(f"expected numbers with + - * / // % **, parentheses, and {', '.join(_FUNCTIONS)}; found {found[:100]!r}")


def _number(text: str) -> Fraction:
    """A literal, exactly. One with an exponent is read as a float first, which bounds it."""
    is_plain = not any(letter in text.lower() for letter in "ebox")
    if is_plain:
        return Fraction(text)
    if math.isinf(value := float(text)):
        raise ValueError(f"a number is too large: {text[:100]}")
    return Fraction(repr(value))


def _bounded(value: Fraction) -> Fraction:
    """The value as a fraction. Raises ValueError when it is too large."""
    value = Fraction(value)
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError(f"a number is too large: more than {_BITS} bits")
    return value
