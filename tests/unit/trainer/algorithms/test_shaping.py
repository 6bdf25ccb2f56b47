"""Shaping of scores and rewards per token: worked numbers, naive loops, and preserved sums."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_trainer.algorithms import shaping
from polyreme_trainer.algorithms.batch import sequence_sums
from polyreme_trainer.algorithms.state import AlgorithmState, Moments
from support.token_batches import offsets_of, ragged_mask, token_batch


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=5))
def test_moments_are_those_of_all_numbers(parts: list[list[float]]) -> None:
    moments = Moments()
    for part in parts:
        moments = moments.update(np.array(part))
    values = [x for part in parts for x in part]
    assert moments.count == len(values)
    if len(values) > 1:
        mean = math.fsum(values) / len(values)
        squares = math.fsum((x - mean) ** 2 for x in values)
        assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
        assert moments.squares == pytest.approx(squares, rel=1e-7, abs=1e-6)


def test_normalisation_of_worked_scores() -> None:
    moments = Moments().update(np.array([1.0, 3.0])).update(np.array([5.0, 7.0]))
    found = shaping.normalise(np.array([5.0, 7.0]), moments)
    np.testing.assert_allclose(found, np.array([1.0, 3.0]) / math.sqrt(20 / 3))
    np.testing.assert_array_equal(shaping.normalise(np.array([2.0, 2.0]), Moments().update(np.array([2.0, 2.0]))), [0, 0])


def test_state_survives_a_checkpoint() -> None:
    state = AlgorithmState(kl_coef=0.1, scores=Moments(3.0, 0.2, 1.5))
    assert AlgorithmState.from_json(state.to_json()) == state


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (101, -0.5), (10_000, -0.5)])
def test_the_overlong_penalty_is_linear_and_capped(length: int, expected: float) -> None:
    found = shaping.overlong_penalty(np.array([length]), np.array(100), np.array(20.0), factor=0.5)
    assert found.tolist() == [pytest.approx(expected)]


def test_the_repetition_penalty_counts_repeated_ngrams() -> None:
    ids = np.array([1, 2, 1, 2, 1, 5, 6, 7, 8, 3, 9, 3, 9])
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0], dtype=np.float32)
    offsets = np.array([0, 5, 9, 13, 13])
    # 12 21 12 21: half repeat; 56 67 78: none; 3 3, the masked 9 left out: one bigram; no token
    np.testing.assert_allclose(shaping.repetition_penalty(ids, mask, offsets, 2, 0.8), [-0.4, 0, 0, 0])
    np.testing.assert_allclose(shaping.repetition_penalty(ids, mask, offsets, 1, 0.8), [-0.8 * 3 / 5, 0, -0.4, 0])


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 1000), st.booleans(), st.booleans())
def test_token_rewards_add_up_to_the_score(sizes: list[int], seed: int, with_process: bool, with_kl: bool) -> None:
    random = np.random.default_rng(seed)
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    scores = random.normal(size=len(sizes))
    process, kl = np.where(mask > 0, random.normal(size=(2, len(mask))), np.nan)
    found = shaping.token_rewards(scores, mask, offsets, process if with_process else None, kl if with_kl else None)
    expected = np.zeros(len(mask))
    for i in range(len(sizes)):
        trained = [t for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        rest = scores[i]
        for t in trained:
            rest -= process[t] if with_process else 0
            expected[t] = (process[t] if with_process else 0) - (kl[t] if with_kl else 0)
        if trained:
            expected[trained[-1]] += rest
    np.testing.assert_allclose(found, expected, atol=1e-12)
    if not with_kl:
        has_token = sequence_sums(mask, offsets) > 0
        np.testing.assert_allclose(sequence_sums(found, offsets), np.where(has_token, scores, 0), atol=1e-12)


def test_distillation_is_the_difference_of_log_probabilities() -> None:
    mask = np.array([1, 0, 1], dtype=np.float32)
    teacher, student = np.array([-1, np.nan, -0.5], np.float32), np.array([-1.5, -1, -0.25], np.float32)
    np.testing.assert_array_equal(shaping.distillation_advantages(teacher, student, mask, 2.0), [1.0, 0, -0.5])


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    batch = token_batch(0)
    assert (shaping.distillation_advantages(batch.behaviour, batch.behaviour, batch.mask, 1.0) == 0).all()
