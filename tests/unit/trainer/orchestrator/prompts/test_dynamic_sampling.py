"""Groups of equal scores are dropped within the bound, and stay in the metrics."""

import numpy as np
import pytest

from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme.experience.shard import Shard
from polyreme_trainer.orchestrator.prompts.prompt_filter import REFILL, DynamicSampling


def group(*scores: float) -> GroupRecord:
    ids = np.ones(2, dtype=np.int32)
    samples = [SampleRecord(ids, np.zeros(2, np.float32), np.ones(2, np.uint8), 1, [(0, 0, 2)], score) for score in scores]
    return GroupRecord(0, 1, ids, samples)


def test_equal_scores_are_dropped_up_to_the_bound_and_counted() -> None:
    sampling = DynamicSampling(True, groups=2)
    assert not sampling.drops(group(0.0, 1.0))
    assert [sampling.drops(group(1.0, 1.0)) for _ in range(2 * REFILL + 1)] == [True] * 2 * REFILL + [False]
    assert sampling.take() == {
        "rollout/dropped_groups": (2 * REFILL, 0),
        "rollout/mean_score": (pytest.approx(0.5 + 2 * REFILL + 1), 2 * REFILL + 2),
    }
    assert not sampling.drops(group(1.0, 1.0)), "what was counted is no iteration"
    sampling.next_iteration()
    assert sampling.drops(group(0.1 + 0.2, 0.3))  # equal but for rounding


def test_orchestrators_share_the_bound() -> None:
    dropped = 0
    for number in range(3):
        sampling = DynamicSampling(True, groups=5, shard=Shard(number, 3))
        dropped += sum(sampling.drops(group(1.0, 1.0)) for _ in range(5 * REFILL))
    assert dropped == 5 * REFILL


def test_nothing_is_dropped_or_recorded_without_dynamic_sampling() -> None:
    sampling = DynamicSampling(False, groups=2)
    assert not sampling.drops(group(1.0, 1.0))
    assert sampling.take() == {}
