"""The warm start's plan: rates and rows."""

from pathlib import Path

import numpy as np
import pytest

from polyreme.config.trainer import SftPhase
from polyreme_trainer.stages.sft import FLOOR, batches, learning_rate


def phase(**changes: object) -> SftPhase:
    fields = {"data": Path("rows.jsonl"), "steps": 100, "batch_size": 4, "lr": 2e-3, "warmup": 10, "cooldown": 20}
    return SftPhase.model_validate(fields | changes)


def test_the_rate_warms_up_holds_and_cools_down() -> None:
    rates = [learning_rate(phase(), step) / 2e-3 for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10:80] == pytest.approx([1.0] * 70)
    np.testing.assert_allclose(rates[80:], FLOOR + (1 - FLOOR) * np.arange(19, -1, -1) / 20)
    assert rates[-1] == pytest.approx(FLOOR)


def test_without_ramps_the_rate_is_constant() -> None:
    assert {learning_rate(phase(warmup=0, cooldown=0), step) for step in range(100)} == {2e-3}


def test_passes_over_the_rows_are_complete_shuffled_and_repeatable() -> None:
    taken = np.concatenate(list(batches(7, 7, 4, seed=(3, 0))))
    assert len(taken) == 28
    passes = taken.reshape(4, 7)
    for one in passes:
        assert sorted(one.tolist()) == list(range(7))
    assert len({tuple(p) for p in passes}) > 1
    np.testing.assert_array_equal(taken, np.concatenate(list(batches(7, 7, 4, seed=(3, 0)))))
    assert (taken != np.concatenate(list(batches(7, 7, 4, seed=(4, 0))))).any()


def test_fewer_rows_than_a_batch_repeat_within_it() -> None:
    (rows,) = batches(3, 1, 7, seed=(0, 0))
    assert np.bincount(rows, minlength=3).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
