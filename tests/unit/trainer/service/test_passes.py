"""Which batches share a pass, and whether a sampler's snapshot is the learner's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.service.batch import FloatArray, plan_passes
from polyreme_trainer.service.snapshots import SnapshotProbe


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(1, 50), st.integers(1, 4))
def test_passes_keep_the_order_and_the_limits(counts: list[int], budget: int, most: int) -> None:
    tokens = {f"model {number}": count for number, count in enumerate(counts)}
    passes = plan_passes(tokens, budget, most)
    assert [model for each in passes for model in each] == list(tokens)
    for each in passes:
        assert 1 <= len(each) <= most
        assert len(each) == 1 or sum(tokens[model] for model in each) <= budget


def test_a_batch_beyond_the_budget_is_alone() -> None:
    assert plan_passes({"a": 3, "b": 20, "c": 3, "d": 4}, 10, 8) == [["a"], ["b"], ["c", "d"]]


def test_the_canary_is_always_the_same_and_fits() -> None:
    assert np.array_equal(SnapshotProbe.of(100, 64, "float32").ids, SnapshotProbe.of(100, 64, "float32").ids)
    assert len(SnapshotProbe.of(100, 5, "float32").ids) == 4


def test_a_sampler_with_other_weights_is_found() -> None:
    canary, learned = SnapshotProbe.of(100, 4, "float32"), floats(-1.0, -2.0, -3.0)
    assert canary.mismatch(learned, learned + np.float32(1e-4)) is None
    problem = canary.mismatch(learned, floats(-1.0, -2.1, -3.0))
    assert problem is not None and "at most 0.0001" in problem
    assert canary.mismatch(learned, floats(-1.0, np.nan, -3.0)) is not None
