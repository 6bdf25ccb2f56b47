"""A value that is written in two ways is equal to itself and unequal to its neighbours, in every rule that compares answers."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import make_rule

SPACES = " \u00a0\u2002\u2005\u2007\u2008\u2009\u200a\u202f\u205f"
RULES = {name: make_rule(name, {}) for name in ("math", "numeric", "choice", "exact")}


def score(name: str, response: str, label: str) -> object:
    return RULES[name](Item("", "p", response, label=label))


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


mantissas = st.integers(1, 9999)
exponents = st.integers(-300, 300)
SCIENTIFIC: list[Callable[[int, int], str]] = [
    lambda m, e: f"{m}e{e}",
    lambda m, e: f"{m}E{e:+}",
    lambda m, e: rf"{m}\times10^{{{e}}}",
    lambda m, e: rf"{m} \cdot 10^{{{e}}}",
    lambda m, e: f"{m}\u00d710^{{{e}}}".replace("-", "\u2212"),
    lambda m, e: f"{m}*10**{e}" if e >= 0 else f"{m} x 10^{e}",
    lambda m, e: (
        f"{m}\u00d710"
        + str(e).translate(str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"))
    ),
]


@pytest.mark.parametrize("name", ["math", "numeric"])
@given(mantissas, exponents, st.sampled_from(SCIENTIFIC), st.sampled_from(SCIENTIFIC), st.booleans())
def test_scientific_notation(
    name: str, mantissa: int, exponent: int, one: Callable[[int, int], str], other: Callable[[int, int], str], boxed: bool
) -> None:
    def shown(text: str) -> str:
        return rf"\boxed{{{text}}}" if boxed else text

    label = other(mantissa, exponent)
    assert score(name, shown(one(mantissa, exponent)), label) == 1.0
    assert score(name, shown("-" + one(mantissa, exponent)), label) == 0.0
    assert score(name, shown(one(mantissa, exponent + 1)), label) == 0.0
    assert score(name, shown(one(mantissa, exponent - 1)), label) == 0.0
    assert score(name, shown(one(mantissa + 1, exponent)), label) == 0.0


@pytest.mark.parametrize("name", ["math", "numeric"])
@given(
    st.integers(1000, 10**12),
    st.sampled_from([*SPACES, ",", r"\,", r"\;", "{,}", "'", "\u2019", r",\!"]),
    st.sampled_from(["", "-", "\u2212", "\u2013"]),
)
def test_thousands(name: str, number: int, separator: str, sign: str) -> None:
    text = sign + grouped(number, separator)
    value = -number if sign else number
    assert score(name, rf"\boxed{{{text}}}", str(value)) == 1.0
    assert score(name, rf"\boxed{{{value}}}", text) == 1.0
    assert score(name, rf"\boxed{{{text}}}", str(-value)) == 0.0
    assert score(name, rf"\boxed{{{text}}}", str(value + 1)) == 0.0
    assert score(name, rf"\boxed{{{text}}}", str(number % 1000)) == 0.0 or number % 1000 == value


@given(st.integers(-50, 50), st.integers(2, 60), st.integers(0, 3))
def test_fractions(over: int, under: int, form: int) -> None:
    assume(abs(over) > 0)
    sign, size = "-" if over < 0 else "", abs(over)
    text = [
        f"{sign}{size}/{under}",
        rf"{sign}\frac{{{size}}}{{{under}}}",
        rf"{sign}\dfrac{{{size}}}{{{under}}}",
        rf"{sign}\frac{{{7 * size}}}{{{7 * under}}}",
    ][form]
    value = Fraction(over, under)
    assert score("math", rf"\boxed{{{text}}}", f"{value.numerator}/{value.denominator}") == 1.0
    for wrong in (-value, value + Fraction(1, 60), value * 10):
        assert score("math", rf"\boxed{{{text}}}", f"{wrong.numerator}/{wrong.denominator}") == 0.0


@given(st.sampled_from("xyz"), st.integers(1, 9), st.integers(-9, 9), st.integers(1, 5), st.booleans())
def test_equations(variable: str, slope: int, rest: int, factor: int, turned: bool) -> None:
    sign = -1 if turned else 1
    label = f"{slope}a{'+' if rest >= 0 else '-'}{abs(rest)}{variable}=7"

    def equation(slope: int, rest: int, right: int) -> str:
        return rf"\boxed{{{slope}a+{rest}{variable}={right}}}".replace("+-", "-")

    assert score("math", equation(sign * factor * slope, sign * factor * rest, sign * factor * 7), label) == 1.0
    assert score("math", equation(slope + 1, rest, 7), label) == 0.0
    assert score("math", equation(slope, rest + 1, 7), label) == 0.0
    assert score("math", equation(slope, rest, -7), label) == 0.0
    assert score("math", r"\boxed{7}", label) == 0.0


@given(
    st.integers(1, 200),
    st.sampled_from(
        ["2^{%d}", r"\frac{1}{2^{%d}}", r"\sqrt{3}\cdot2^{-%d}", r"\frac{x}{2^{%d}}", r"\{2^{-%d},5\}", r"y=2^{-%d}x"]
    ),
)
def test_powers(exponent: int, form: str) -> None:
    label, answer = form % exponent, rf"\boxed{{{form % exponent}}}"
    assert score("math", answer, label) == 1.0
    assert score("math", answer, form % (exponent + 1)) == 0.0
    assert (
        score("math", answer, form.replace("2^", "-2^") % exponent if "x" not in form else form.replace("x", "-x") % exponent)
        == 0.0
    )


LETTER_FORMS = [
    "{}",
    "({})",
    "**{}**",
    r"\boxed{{\text{{{}}}}}",
    "\u7b54\u6848\u662f{}\u3002",
    "\u7b54\u6848\uff1a{}",
    "\u9009{}",
    "Antwort: {}",
    "Die Antwort ist {}.",
    "La r\u00e9ponse est {}.",
    "\u041e\u0442\u0432\u0435\u0442: {}",
    "\u6b63\u89e3\u306f{}\u3067\u3059",
    "\uc815\ub2f5\uc740 {}\uc785\ub2c8\ub2e4",
    "{}. Paris",
    "The answer is {}",
]


@given(st.sampled_from("ABCDEFGH"), st.sampled_from(LETTER_FORMS), st.booleans())
def test_letters(letter: str, form: str, wide: bool) -> None:
    shown = chr(ord(letter) + 0xFEE0) if wide else letter
    assert score("choice", form.format(shown), letter) == 1.0
    assert score("choice", form.format(chr(ord(letter) + 1)), letter) == 0.0


@given(st.text(alphabet="ae\u0301\u00e9 \u00a05-", max_size=12), st.sampled_from(SPACES))
def test_exact_text(text: str, space: str) -> None:
    assume(text.strip())
    assert score("exact", text.replace(" ", space) + "\u200b\r\n", text) == 1.0
    assert score("exact", text + "x", text) == 0.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**6), max_value=10**6))
def test_decimals(number: Decimal) -> None:
    for name in ("math", "numeric"):
        text = f"{number:f}".replace("-", "\u2212")
        assert score(name, rf"\boxed{{{text}}}", f"{number:f}0") == 1.0
        assert score(name, rf"\boxed{{{text}}}", f"{number + Decimal('0.001'):f}") == 0.0


@given(st.text(alphabet="0123456789xyei=+-*/^{}()[]|\\,.<>! \u2009\u2212\u00b2", max_size=30))
def test_any_text_is_judged_within_bounds(text: str) -> None:
    for response, label in ((rf"\boxed{{{text}}}", "x+1"), (r"\boxed{2}", text), (text, text)):
        try:
            assert score("math", response, label) in (0.0, 1.0)
        except RewardError:
            assert label == text
