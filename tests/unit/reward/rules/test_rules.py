"""The built-in rewards' scores, and their names and options."""

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, RewardError, Status
from polyreme_reward.rules import BUILTINS, Builtin, Rule, builtin_version, check_rule, make_rule
from polyreme_reward.rules.quantity import last_in
from polyreme_reward.rules.reward import LOOP_CHARS, RuleReward
from polyreme_reward.rules.spelling import plain


def ask(name: str, response: str, label: str, **options: object) -> object:
    return make_rule(name, options)(Item("", "prompt", response, label=label))


@pytest.mark.parametrize(
    ("response", "label", "score"), [("5", "5", 1.0), (" 5\n", "5", 1.0), ("5.", "5", 0.0), ("a", "A", 0.0), ("", "5", 0.0)]
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
        ("9" * 100_000, "9" * 100_000, 1.0),
        ("-" + "9" * 100_000 + ".50", "-" + "9" * 100_000 + ".5", 1.0),
        ("9" * 100_000, "9" * 99_999 + "8", 0.0),
        ("1e9999", "10e9998", 1.0),
        ("1,2," * 100_000 + "3", "3", 1.0),
        (r"\boxed{" * 30_000 + "3", "3", 0.0),
        ("no, wait, " * 30_000 + "3", "3", 1.0),
        ("answer: " * 30_000 + "3", "3", 1.0),
        ("<think>" * 30_000 + "</think> 3", "3", 1.0),
    ],
    ids=range(9),
)
def test_numeric_of_long_texts(response: str, label: str, score: float) -> None:
    assert ask("numeric", response, label) == score


@pytest.mark.parametrize("name", ["numeric", "math"])
@pytest.mark.parametrize(
    "response",
    [
        "She makes 9 * 2 = $<<9*2=18>>18 every day.",
        "The answer is <<(16-7)*2=18>>18",
        r"\boxed{<<9*2=18>>18}",
        "3<<3=3>>3\n#### 18",
    ],
)
def test_gsm8k_calculations_are_no_answer(name: str, response: str) -> None:
    assert ask(name, response, "18") == 1.0
    assert ask(name, response, "9") == 0.0


def test_numeric_looks_behind_the_marker() -> None:
    assert ask("numeric", "#### 5 of 9 apples 9", "9", after="####") == 1.0
    assert ask("numeric", "9", "9", after="####") == 0.0


def value(text: str) -> object:
    found, _ = last_in(text)
    return found and found.value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12))
def test_equal_numbers_have_one_value(number: Decimal) -> None:
    spelled = [f"{number:f}", f"{number:,f}", f"{number:,f}".replace(",", " "), f"{number:f}00"]
    assert {value(f"so it is {text} apples") for text in spelled} == {Fraction(number)}


@given(st.text(alphabet="0123456789,.-/:^{}e\\$ #", max_size=60))
def test_any_text_has_a_number_or_none(text: str) -> None:
    found, place = last_in(text)
    assert (place >= 0) == bool(re.search("[0-9]", plain(text)))
    assert found is None or place >= 0


@pytest.mark.parametrize("name", ["exact", "numeric"])
def test_a_row_without_label_is_an_error(name: str) -> None:
    with pytest.raises(RewardError, match="label"):
        ask(name, "", "")


def test_a_fraction_as_label_names_the_reward_that_compares_it() -> None:
    with pytest.raises(RewardError, match="math"):
        ask("numeric", "4", "3/4")


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**12), max_value=10**12), st.integers(-30, 30))
def test_an_exponent_moves_the_point(number: Decimal, exponent: int) -> None:
    assert value(f"so {number:f}e{exponent}, done") == Fraction(number) * Fraction(10) ** exponent


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


async def test_a_rule_answers_every_item() -> None:
    reward = RuleReward("exact", 1.0, "v", "", make_rule("exact", {}))
    items = [Item("", "", "3", label="3"), Item("", "", "3", label=""), Item("", "", "4" * 2 * LOOP_CHARS, label="3")]
    outcomes = await reward.score(items)
    await reward.close()
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.ERROR, Status.OK]
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("exat", {}), ("exact", {"aftr": "#"}), ("code", {"timeout": 0}), ("code", {"unsafe": "perhaps"}), ("math", {"after": []})],
)
def test_a_check_refuses_what_making_the_rule_would(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_rule(name, options)
    with pytest.raises(ConfigError):
        make_rule(name, options)


def test_a_check_makes_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def code(timeout: float = 4.0) -> Rule:
        raise AssertionError("made")

    monkeypatch.setitem(BUILTINS, "code", Builtin(code, in_process=False, preload=("no_such_package",)))
    with pytest.raises(ConfigError, match="no_such_package"):
        check_rule("code", {"timeout": 3.0})
    monkeypatch.setitem(BUILTINS, "code", Builtin(code, in_process=False))
    assert check_rule("code", {}).factory is code
