"""The warm start's plan: rates and rows."""

from pathlib import Path

import numpy as np
import pytest

from polyreme.config.trainer import SftPhase
from polyreme_trainer.stages.sft import FLOOR, batches, learning_rate, select


def phase(**changes: object) -> SftPhase:
    fields = {"data": Path("rows.jsonl"), "steps": 100, "batch_size": 4, "lr": 2e-3, "warmup": 10, "cooldown": 20}
    return SftPhase.model_validate(fields | changes)


def test_the_rate_warms_up_holds_and_cools_down() -> None:
    rates = [learning_rate(phase(), step) / 2e-3 for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10:80] == pytest.approx([1.0] * 70)
    np.testing.assert_allclose(rates[80:], np.maximum(FLOOR, np.arange(20, 0, -1) / 20))


def test_without_ramps_the_rate_is_constant() -> None:
    assert {learning_rate(phase(warmup=0, cooldown=0), step) for step in range(100)} == {2e-3}


def test_passes_over_the_rows_are_complete_shuffled_and_repeatable() -> None:
    taken = np.concatenate(list(batches(7, phase(steps=7), seed=(3, 0))))
    assert len(taken) == 28
    passes = taken.reshape(4, 7)
    for one in passes:
        assert sorted(one.tolist()) == list(range(7))
    assert len({tuple(p) for p in passes}) > 1
    np.testing.assert_array_equal(taken, np.concatenate(list(batches(7, phase(steps=7), seed=(3, 0)))))
    assert (taken != np.concatenate(list(batches(7, phase(steps=7), seed=(4, 0))))).any()


def test_fewer_rows_than_a_batch_repeat_within_it() -> None:
    (rows,) = batches(3, phase(steps=1, batch_size=7), seed=(0, 0))
    assert np.bincount(rows, minlength=3).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_only_the_response_is_trained_on() -> None:
    ids = [np.array([5, 6, 7, 1], dtype=np.int32), np.array([5, 1], dtype=np.int32)]
    mask = [np.array([0, 0, 1, 1], dtype=np.uint8), np.array([0, 1], dtype=np.uint8)]
    sequences = select(ids, mask, np.array([1, 0]))
    assert [x.tolist() for x in sequences.ids] == [[5, 1], [5, 6, 7, 1]]
    assert [x.tolist() for x in sequences.mask] == [[1], [0, 1, 1]]
    assert sequences.tokens.tolist() == [1, 2]
