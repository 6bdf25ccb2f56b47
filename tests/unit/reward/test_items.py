"""What counts as a score."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_reward.items import Item, RewardError, Status, failed, judge


@pytest.mark.parametrize("answer", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), Decimal(1), Fraction(1)])
def test_numbers_are_scores(answer: Any) -> None:
    assert judge(answer) == (Status.OK, 1.0, "", {})


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
    outcome = judge({"score": answer} if wrapped else answer)
    assert outcome.status is Status.INVALID
    assert "found" in outcome.message


@pytest.mark.parametrize("answer", [{}, {"acc": 1.0}])
def test_a_mapping_needs_a_score(answer: Any) -> None:
    assert judge(answer).status is Status.INVALID


def test_a_mapping_brings_named_numbers_along() -> None:
    outcome = judge({"score": 0.5, "acc": True, "note": "text", "bad": math.nan})
    assert (outcome.value, outcome.extras) == (0.5, {"acc": 1.0})


def test_named_numbers_are_bounded() -> None:
    outcome = judge({"score": 1.0, **{f"n{k}": k for k in range(1000)}})
    assert len(outcome.extras) == 32


@given(
    st.one_of(st.none(), st.text(), st.floats(), st.integers(), st.lists(st.floats()), st.dictionaries(st.text(), st.floats()))
)
def test_ok_means_finite(answer: Any) -> None:
    outcome = judge(answer)
    assert outcome.status is Status.INVALID or math.isfinite(outcome.value)


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
