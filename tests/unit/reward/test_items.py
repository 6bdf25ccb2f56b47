"""The return values that are valid scores."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_reward.items import Item, RewardError, Status, failed, outcome_of


@pytest.mark.parametrize("answer", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), Decimal(1), Fraction(1)])
def test_numbers_are_scores(answer: Any) -> None:
    assert outcome_of(answer) == (Status.OK, 1.0, "", {}, ())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "1.0",
        b"1",
        "",
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        [],
        [1.0],
        object(),
        1j,
        np.array([1.0, 2.0]),
        np.float64("nan"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_any_other_answer_is_invalid_and_shown(answer: Any, wrapped: bool) -> None:
    outcome = outcome_of({"score": answer} if wrapped else answer)
    assert outcome.status is Status.INVALID
    assert "found" in outcome.message


@pytest.mark.parametrize("answer", [{}, {"acc": 1.0}])
def test_a_mapping_needs_a_score(answer: Any) -> None:
    assert outcome_of(answer).status is Status.INVALID


def test_a_mapping_brings_named_numbers_along() -> None:
    outcome = outcome_of({"score": 0.5, "acc": True, "note": "text", "bad": math.nan})
    assert (outcome.value, outcome.extras) == (0.5, {"acc": 1.0})


def test_named_numbers_are_bounded() -> None:
    outcome = outcome_of({"score": 1.0, **{f"n{k}": k for k in range(1000)}})
    assert len(outcome.extras) == 32


@given(
    st.one_of(st.none(), st.text(), st.floats(), st.integers(), st.lists(st.floats()), st.dictionaries(st.text(), st.floats()))
)
def test_ok_means_finite(answer: Any) -> None:
    outcome = outcome_of(answer)
    assert outcome.status is Status.INVALID or math.isfinite(outcome.value)


@pytest.mark.parametrize(
    "answer", [[1, 0.5, -2], (1, 0.5, -2), np.array([1, 0.5, -2]), np.array([1, 0.5, -2], np.float32), [Decimal(1), 0.5, -2]]
)
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"score": a}, lambda a: {"token_rewards": a, "score": None}])
def test_one_number_per_token_is_a_score_too(answer: Any, wrap: Any) -> None:
    assert outcome_of(wrap(answer), tokens=3) == (Status.OK, -0.5, "", {}, (1.0, 0.5, -2.0))


def test_a_score_may_have_more_than_its_tokens() -> None:
    assert outcome_of({"score": 5, "token_rewards": [1, 2], "acc": 1}, tokens=2) == (Status.OK, 5.0, "", {"acc": 1.0}, (1.0, 2.0))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([1.0, 2.0], "expected 3 numbers, one per token; found 2"),
        ([], "found 0"),
        (np.zeros((3, 2)), "found"),
        (np.zeros(4), "found 4"),
        ([1.0, None, 2.0], "for token 1"),
        ([1.0, 2.0, math.nan], "for token 2"),
        ([1.0, 2.0, 1e39], "for token 2"),
        ([[1.0], 2.0, 3.0], "for token 0"),
        (["1", "2", "3"], "for token 0"),
        ({"token_rewards": 3}, "found 3 (int)"),
        ({"token_rewards": "abc"}, "found 3"),
        ({"token_rewards": [1, 2, 3], "score": math.nan}, "nan"),
        ({"token_rewards": [1, 2, 3], "score": "high"}, "high"),
    ],
)
def test_what_is_not_one_finite_number_per_token_is_invalid(answer: Any, found: str) -> None:
    outcome = outcome_of(answer, tokens=3)
    assert (outcome.status, outcome.token_rewards) == (Status.INVALID, ()) and found in outcome.message


def test_an_item_without_tokens_takes_no_list() -> None:
    assert "no tokens" in outcome_of([1.0, 2.0]).message


@given(st.lists(st.floats(allow_nan=False, width=32, allow_infinity=False), min_size=1, max_size=20))
def test_the_score_is_the_sum_of_its_tokens(numbers: list[float]) -> None:
    outcome = outcome_of(numbers, tokens=len(numbers))
    assert (outcome.value, outcome.token_rewards) == (math.fsum(numbers), tuple(numbers))


def test_messages_are_bounded_and_printable() -> None:
    outcome = failed(Status.ERROR, "\ud800" + "x" * 100_000)
    assert len(outcome.message) < 2100
    outcome.message.encode()


@pytest.mark.parametrize("text", ["[]", "{", "3", "[" * 100_000])
def test_metadata_that_is_not_an_object_is_an_error(text: str) -> None:
    with pytest.raises(RewardError, match="metadata_json"):
        _ = Item("", "", "", metadata_json=text).metadata


def test_no_metadata_is_an_empty_object() -> None:
    assert Item("", "", "").metadata == {}
