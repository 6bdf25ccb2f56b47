"""The canary fails for differences above the limit and for values that are not numbers."""

import math
from contextlib import nullcontext

import pytest

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights.canary import Canary, CanaryError, limit_of

CANARY = Canary((4, 5, 6), (-1.0, -2.0), 0.125)


@pytest.mark.parametrize(("found", "difference"), [([-1.0, -2.0], 0.0), ([-1.25, -2.0], 0.125), ([-0.875, -2.125], 0.125)])
def test_the_mean_absolute_difference_is_at_most_the_limit(found: list[float], difference: float) -> None:
    assert CANARY.check(found) == difference


@pytest.mark.parametrize("found", [[-1.5, -2.0], [math.nan, -2.0], [-math.inf, -2.0], [-1.0], [-1.0, -2.0, -3.0]])
def test_what_differs_more_fails(found: list[float]) -> None:
    with pytest.raises(CanaryError):
        CANARY.check(found)


@pytest.mark.parametrize(
    ("dtype", "chosen", "difference", "passes"),
    [
        *[("float32", None, difference, passes) for difference, passes in ((1e-5, True), (0.01, False))],
        *[("bfloat16", None, difference, passes) for difference, passes in ((0.01, True), (0.5, False))],
        *[("bfloat16", 1e-3, difference, passes) for difference, passes in ((1e-5, True), (0.01, False))],
    ],
)
def test_the_limit_is_that_of_the_dtype_or_the_chosen_one(
    dtype: str, chosen: float | None, difference: float, passes: bool
) -> None:
    canary = Canary((4, 5), (-1.0,), limit_of(dtype, chosen))
    with nullcontext() if passes else pytest.raises(CanaryError):
        canary.check([-1.0 - difference])


def test_a_learner_without_numbers_fails_every_replica() -> None:
    with pytest.raises(CanaryError):
        Canary((1, 2), (math.nan,), 1.0).check([math.nan])


def test_the_message_holds_it() -> None:
    assert Canary.from_proto(pb.Canary.FromString(CANARY.to_proto().SerializeToString())) == CANARY
