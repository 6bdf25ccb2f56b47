"""The built-in rewards' scores, and their names and options."""

import re
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.errors import ConfigError
from polyreme_reward.inline import InlineReward
from polyreme_reward.items import Item, RewardError, Status
from polyreme_reward.rules import builtin_version, make_rule
from polyreme_reward.rules.answers import last_number


def ask(name: str, response: str, label: str, **options: object) -> object:
    return make_rule(name, options)(Item("", "prompt", response, label=label))


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("5", "5", 1.0), (" 5\n", "5", 1.0), ("5.", "5", 0.0), ("a", "A", 0.0), ("", "5", 0.0)],
)
def test_exact(response: str, label: str, score: float) -> None:
    assert ask("exact", response, label) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("b8+5=3#3", 1.0), ("#3", 1.0), ("3", 0.0), ("#3#3", 0.0), ("x##3", 0.0), ("b8+5=3#4", 0.0), ("", 0.0), ("#", 0.0)],
)
def test_exact_looks_behind_the_first_marker(response: str, score: float) -> None:
    assert ask("exact", response, "3", after="#") == score


def test_exact_may_ignore_case() -> None:
    assert ask("exact", "PARIS", "Paris", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("6 * 7 = 42", "#### 42", 1.0),
        ("It is 1,234.50 dollars.", "1234.5", 1.0),
        ("first 3, then 4", "3", 0.0),
        ("-5", "5", 0.0),
        ("10-5", "5", 1.0),
        ("-0.0", "0", 1.0),
        ("007", "7", 1.0),
        (".5", "0.50", 1.0),
        ("1, 2, 3", "3", 1.0),
        ("1,2,3", "3", 1.0),
        ("The total is 1,234, so we are done", "1234", 1.0),
        ("The total is 1,234, so we are done", "234", 0.0),
        ("He pays $12,500, not more.", "12500", 1.0),
        ("It is 1,000,", "0", 0.0),
        ("3.2e10", "7.5e10", 0.0),
        ("1.5e3", "1500", 1.0),
        ("0.001", "1e-3", 1.0),
        ("2e", "2", 1.0),
        ("\u22125", "-5", 1.0),
        ("-$5", "-5", 1.0),
        (r"1{,}000 or 1,\!000", "1000", 1.0),
        ("none at all", "3", 0.0),
        ("9" * 100_000, "9" * 100_000, 1.0),
        ("9" * 100_000, "9" * 99_999 + "8", 0.0),
    ],
)
def test_numeric(response: str, label: str, score: float) -> None:
    assert ask("numeric", response, label) == score


def test_numeric_looks_behind_the_marker() -> None:
    assert ask("numeric", "#### 5 of 9 apples 9", "9", after="####") == 1.0
    assert ask("numeric", "9", "9", after="####") == 0.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12))
def test_equal_numbers_have_one_spelling(number: Decimal) -> None:
    spelled = [f"{number:f}", f"{number:,f}", f"{number:f}00"]
    assert len({last_number(f"so it is {text} apples") for text in spelled}) == 1
    assert Decimal(last_number(spelled[0]) or "nan") == number


@given(st.text(alphabet="0123456789,.- #", max_size=60))
def test_a_number_is_found_wherever_there_is_a_digit(text: str) -> None:
    assert (last_number(text) is not None) == bool(re.search("[0-9]", text))


@pytest.mark.parametrize("name", ["exact", "numeric"])
def test_a_row_without_label_is_an_error(name: str) -> None:
    with pytest.raises(RewardError, match="label"):
        ask(name, "", "")


def test_a_label_that_is_a_fraction_is_an_error() -> None:
    with pytest.raises(RewardError, match="the fraction '3/4', which the reward `math` compares"):
        ask("numeric", "4", "3/4")


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12), st.integers(-30, 30))
def test_an_exponent_moves_the_point(number: Decimal, exponent: int) -> None:
    with localcontext(prec=100):
        moved = number.scaleb(exponent)
        assert last_number(f"so {number:f}e{exponent}, done") == last_number(f"{moved:f}")


def test_a_label_without_number_is_an_error() -> None:
    with pytest.raises(RewardError, match="number in the label"):
        ask("numeric", "3", "three")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("exakt", {}, "Did you mean exact"), ("exact", {"aftr": "#"}, "after"), ("exact", {"after": 3}, "after")],
)
def test_a_misspelt_name_or_option_names_the_known_ones(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_rule(name, options)


def test_a_version_changes_with_the_options() -> None:
    assert builtin_version("exact", {}) != builtin_version("exact", {"after": "#"})
    assert builtin_version("exact", {"after": "#"}) == builtin_version("exact", {"after": "#"})


async def test_inline_answers_every_item() -> None:
    reward = InlineReward("exact", 1.0, "v", "", make_rule("exact", {}))
    outcomes = await reward.score([Item("", "", "3", label="3"), Item("", "", "3", label=""), Item("", "", "4", label="3")])
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.ERROR, Status.OK]
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 0.0]
