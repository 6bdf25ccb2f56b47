r"""Compares what formulas state: values, equations, inequalities, sets, intervals, tuples and matrices.

Invariant: an equation is its value only if its left side is a symbol, a function's value or has no variables, or equals the right
side anyway. All others are equations, which are equal up to a factor that is not zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import sympy  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from sympy.core.relational import Relational  # type: ignore[import-untyped]
from sympy.logic.boolalg import And, Not  # type: ignore[import-untyped]

from polyreme_reward.rules.compare import difference, factor, is_zero, same

_MEMBERS = 64
"""Maximum members of sets that are compared member by member."""

_DEGREE = 8
"""Maximum degree of an inequality that is solved."""

_STRICT = {sympy.StrictGreaterThan: True, sympy.GreaterThan: False, sympy.StrictLessThan: True, sympy.LessThan: False}


@dataclass(frozen=True)
class Named:
    """A value with the name on its left side. The name is a symbol, a function's value, or None."""

    name: sympy.Basic
    value: sympy.Basic


@dataclass(frozen=True)
class Equation:
    """left = right."""

    left: sympy.Basic
    right: sympy.Basic

    @property
    def zero(self) -> sympy.Basic:
        return difference(self.left, self.right)


@dataclass(frozen=True)
class Inequality:
    """positive > 0, or >= 0 unless strict; or, for `unequal`, positive is not 0."""

    positive: sympy.Basic
    strict: bool
    unequal: bool = False


@dataclass(frozen=True)
class Several:
    """Relations that hold together: a system, or a chain of inequalities."""

    parts: tuple[sympy.Basic, ...]


Meaning: TypeAlias = "Named | Equation | Inequality | Several | sympy.Basic"
"""Named, Equation, Inequality, Several, or a sympy object that is none of these."""


def equal(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    """Whether two objects of sympy state the same."""
    return _equal(meaning(gold), meaning(answer))


def meaning(found: sympy.Basic) -> Meaning:
    """What a sympy object states."""
    if isinstance(found, sympy.Eq):
        return _equation([found.lhs, found.rhs])
    if isinstance(found, And):
        links = list(getattr(found, "_unsorted_args", found.args))
        if all(isinstance(link, sympy.Eq) for link in links):
            return _equation([links[0].lhs, *(link.rhs for link in links)])
        return Several(tuple(meaning(link) for link in links))
    if isinstance(found, sympy.Ne):
        return Inequality(difference(found.lhs, found.rhs), False, unequal=True)
    if isinstance(found, Relational):
        return Inequality(difference(found.gts, found.lts), _STRICT[type(found)])
    if isinstance(found, sympy.FiniteSet) and any(isinstance(each, Relational | And) for each in found.args):
        return _listed([meaning(each) for each in _members(found)])
    return found


def value(found: sympy.Basic) -> sympy.Basic:
    """The value of an object of sympy without the name on its left side."""
    stated = meaning(found)
    return stated.value if isinstance(stated, Named) else found


def _equation(sides: list[sympy.Basic]) -> Meaning:
    first, last = sides[0], sides[-1]
    if isinstance(first, sympy.Tuple | sympy.Interval | sympy.FiniteSet) and len(sides) == 2:  # (x, y) = (1, 2)
        left, right = _ordered(first), _ordered(last)
        if left is not None and right is not None and len(left) == len(right):
            return _listed([_equation(list(pair)) for pair in zip(left, right, strict=True)])
        return Equation(first, last)
    if not isinstance(first, sympy.Expr):
        return Equation(first, last)
    if _is_name(first) and not (isinstance(last, sympy.Expr) and last.has(first)):
        is_value = len(sides) == 2 or not any(isinstance(side, sympy.Symbol) for side in sides[1:])
        return Named(first, last) if is_value else _chain(sides)
    if len(sides) == 2 and _is_name(last) and not _variables(first):  # 3 = x
        return Named(last, first)
    left = sides[:-1]
    if all(isinstance(side, sympy.Expr) for side in sides) and (
        not any(map(_variables, left)) or all(is_zero(difference(side, last)) for side in left)
    ):
        return Named(None, last)
    return _chain(sides)


def _chain(sides: list[sympy.Basic]) -> Meaning:
    links = [Equation(left, right) for left, right in pairwise(sides)]
    return links[0] if len(links) == 1 else Several(tuple(links))


def _is_name(side: sympy.Basic) -> bool:
    return isinstance(side, sympy.Symbol | AppliedUndef | sympy.Derivative) or (
        isinstance(side, sympy.Pow) and isinstance(side.base, AppliedUndef) and side.exp == -1  # the inverse function
    )


def _variables(side: sympy.Basic) -> bool:
    return bool({str(symbol) for symbol in side.free_symbols} - {"i"}) or side.has(AppliedUndef)


def _listed(parts: list[Meaning]) -> Meaning:
    """The meaning of relations between commas or "or": values of one variable are alternatives, others hold together."""
    names = [part.name for part in parts if isinstance(part, Named)]
    related = any(isinstance(part, Equation | Inequality | Several) for part in parts)
    if len(set(names)) == 1 and not related:
        return Named(names[0], sympy.FiniteSet(*(part.value if isinstance(part, Named) else part for part in parts)))
    return Several(tuple(parts))


def _members(found: sympy.Basic) -> Sequence[sympy.Basic]:
    """The members in the order in which they were written, if that is known."""
    return tuple(getattr(found, "_unsorted_args", found.args))


def _ordered(found: sympy.Basic) -> Sequence[sympy.Basic] | None:
    """The members of a tuple. An open interval (1, 2) may be a pair, and a list without brackets a tuple."""
    if isinstance(found, sympy.Interval):
        return (found.start, found.end) if found.is_open else None
    return _members(found) if isinstance(found, sympy.Tuple | sympy.FiniteSet) else None


def _equal(gold: Meaning, answer: Meaning) -> bool:
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name != answer.name and all(isinstance(each.name, sympy.Symbol) for each in (gold, answer)):
            return _proportional(gold, answer)
        if (answer := _with_argument(answer, gold.name)) is None:
            return False
        return _equal(gold.value, answer.value)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Named) and isinstance(other, Several):
            values = _indexed(other, one.name)
            return isinstance(one.value, sympy.FiniteSet) and values is not None and _match(_members(one.value), values)
        if isinstance(one, Named) and isinstance(other, Equation):
            return _proportional(one, other)
        if isinstance(one, Named):
            return _equal(one.value, other) if one is gold else _equal(other, one.value)
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return isinstance(gold, Equation) and isinstance(answer, Equation) and _proportional(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _match(gold.parts, answer.parts) or _same_solutions(gold, answer)
    if isinstance(gold, Inequality) and isinstance(answer, Inequality):
        return _same_inequality(gold, answer) or _same_solutions(gold, answer)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Several) and all(isinstance(part, Named) for part in one.parts):
            values = _ordered(other)
            return values is not None and _in_order([part.value for part in one.parts], values)
    if isinstance(gold, Inequality | Several) or isinstance(answer, Inequality | Several):
        return _same_solutions(gold, answer)
    return _same_objects(gold, answer)


def _indexed(found: Several, name: sympy.Basic) -> Sequence[sympy.Basic] | None:
    """The values of one unknown that have its indices as names, x_1 = 1 and x_2 = 2; None: they are others."""
    values = [part.value for part in found.parts if isinstance(part, Named) and str(part.name).startswith(f"{name}_")]
    return values if len(values) == len(found.parts) else None


def _with_argument(answer: Named, name: sympy.Basic) -> Named | None:
    """A function with the variable of its other definition: f(t) = t + 1 as f(x) = x + 1. None when that has another meaning."""
    both = (answer.name, name)
    if not all(
        isinstance(each, AppliedUndef) and len(each.args) == 1 and isinstance(each.args[0], sympy.Symbol) for each in both
    ):
        return answer
    (old,), (new,) = (each.args for each in both)
    if answer.name.func != name.func or old == new or not isinstance(answer.value, sympy.Expr):
        return answer
    return None if answer.value.has(new) else Named(name, answer.value.xreplace({old: new}))


def _proportional(gold: Named | Equation, answer: Named | Equation) -> bool:
    """Whether two equations differ by a factor."""
    pair = [Equation(each.name, each.value) if isinstance(each, Named) else each for each in (gold, answer)]
    if any(each.left is None for each in pair):
        return False
    if not all(isinstance(side, sympy.Expr) for each in pair for side in (each.left, each.right)):
        return _same_objects(pair[0].left, pair[1].left) and _same_objects(pair[0].right, pair[1].right)
    return factor(pair[0].zero, pair[1].zero) is not None


def _same_inequality(gold: Inequality, answer: Inequality) -> bool:
    if (gold.strict, gold.unequal) != (answer.strict, answer.unequal):
        return False
    ratio = factor(gold.positive, answer.positive)
    return ratio is not None and (gold.unequal or (ratio.imag == 0 and ratio.real > 0))


def _same_solutions(gold: Meaning, answer: Meaning) -> bool:
    """Whether inequalities in one variable, or sets, have the same solutions."""
    sets = [_solutions(each) for each in (gold, answer)]
    return all(each is not None for each in sets) and _same_objects(*sets)


def _solutions(found: Meaning) -> sympy.Basic:
    """The set of a meaning, or None."""
    if isinstance(found, sympy.Set):
        return found
    if isinstance(found, Several):
        sets = [_solutions(part) for part in found.parts]
        if any(each is None for each in sets):
            return None
        whole = sympy.Intersection(*sets)
        return sympy.Union(*sets) if whole is sympy.S.EmptySet else whole  # x < 1 or x > 3 is written with a comma, too
    if not isinstance(found, Inequality) or len(found.positive.free_symbols) != 1:
        return None
    (symbol,) = found.positive.free_symbols
    if found.unequal:
        return sympy.Complement(sympy.S.Reals, sympy.solveset(found.positive, symbol, sympy.S.Reals))
    positive = sympy.nsimplify(found.positive, rational=True)
    if any(isinstance(power.exp, sympy.Number) and abs(power.exp) > _DEGREE for power in positive.atoms(sympy.Pow)):
        return None
    line = sympy.Poly(positive, symbol) if positive.is_polynomial(symbol) else None
    if line is not None and line.degree() == 1:  # solveset needs a second
        slope, rest = line.all_coeffs()
        ends = (-rest / slope, sympy.oo) if slope > 0 else (-sympy.oo, -rest / slope)
        return sympy.Interval(*ends, left_open=found.strict, right_open=found.strict)
    return sympy.solveset((sympy.StrictGreaterThan if found.strict else sympy.GreaterThan)(positive, 0), symbol, sympy.S.Reals)


def _same_objects(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    """Compares sets, tuples, matrices and expressions."""
    gold, answer = (_equal_form(each) for each in (gold, answer))
    if gold == answer:
        return not any(isinstance(each, sympy.Basic) and each.has(sympy.zoo, sympy.nan) for each in (gold, answer))
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        both = isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase) and gold.shape == answer.shape
        return both and all(same(one, other) for one, other in zip(gold.flat(), answer.flat(), strict=True))
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return ends and same(gold.start, answer.start) and same(gold.end, answer.end)
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return _match(_members(gold), _members(answer))
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.Expr) and len(one.args) == 1:
            return same(one.args[0], other)
    in_order = (_ordered(gold), _ordered(answer))
    if isinstance(gold, sympy.Set | sympy.Tuple) and in_order[0] is not None and in_order[1] is not None:
        return _in_order(in_order[0], in_order[1])
    if isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set):
        return _same_sets(gold, answer)
    return isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and same(gold, answer)


def _equal_form(found: sympy.Basic) -> sympy.Basic:
    """Sums and products of matrices, and operations on sets, with their values."""
    if isinstance(found, sympy.MatrixExpr) and not isinstance(found, sympy.MatrixSymbol):
        return found.doit()
    if isinstance(found, Not | sympy.Union | sympy.Intersection | sympy.Complement):
        return found.doit()
    return found


def _same_sets(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    parts = [each.args if isinstance(each, sympy.Union) else (each,) for each in (gold, answer)]
    if len(parts[0]) == len(parts[1]) and len(parts[0]) > 1:
        return _match(*parts)
    return gold.symmetric_difference(answer) is sympy.S.EmptySet


def _in_order(gold: Sequence[sympy.Basic], answer: Sequence[sympy.Basic]) -> bool:
    return len(gold) == len(answer) and all(_equal(meaning(one), meaning(other)) for one, other in zip(gold, answer, strict=True))


def _match(gold: Sequence[sympy.Basic], answer: Sequence[sympy.Basic]) -> bool:
    """Whether each member of either side equals one of the other."""
    if len(gold) > _MEMBERS or len(answer) > _MEMBERS:
        return list(gold) == list(answer)
    left, right = [[meaning(each) for each in side] for side in (gold, answer)]
    found = [[_equal(one, other) for other in right] for one in left]
    return all(map(any, found)) and all(map(any, zip(*found, strict=True)))
