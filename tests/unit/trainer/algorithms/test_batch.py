"""Invalid batches, and sums over ragged sequences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_trainer.algorithms.batch import last_trained, sequence_of, sequence_sums
from support.token_batches import offsets_of, ragged_mask, token_batch


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 1000))
def test_sums_and_last_tokens_of_ragged_sequences(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    values = random.normal(size=len(mask))
    parts = [range(offsets[i], offsets[i + 1]) for i in range(len(sizes))]
    np.testing.assert_allclose(sequence_sums(values, offsets), [sum(values[t] for t in part) for part in parts], atol=1e-12)
    assert last_trained(mask, offsets).tolist() == [max((t for t in part if mask[t]), default=-1) for part in parts]
    assert sequence_of(offsets).tolist() == [i for i, part in enumerate(parts) for _ in part]


def test_lengths_count_trained_tokens() -> None:
    batch = token_batch(3)
    assert batch.lengths.tolist() == [int(batch.mask[a:b].sum()) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]


def test_the_policy_is_old_where_it_was_computed() -> None:
    batch = token_batch(0)
    assert batch.policy is batch.behaviour
    with_old = replace(batch, old=batch.behaviour - 1)
    assert with_old.policy is with_old.old


def bad_batches() -> dict[str, dict[str, Any]]:
    good = token_batch(0)
    nan = good.behaviour.copy()
    nan[np.flatnonzero(good.mask)[0]] = np.nan
    return {
        "a token array of another length": {"behaviour": good.behaviour[1:]},
        "a sequence array of another length": {"group": good.group[1:]},
        "offsets that fall": {"offsets": np.array([0, 5, 2, *good.offsets[3:]])},
        "offsets that do not start at 0": {"offsets": np.array([1, *good.offsets[1:]])},
        "a mask that is a weight": {"mask": good.mask / 2},
        "a score that is not a number": {"score": np.where(np.arange(12) == 3, np.nan, good.score)},
        "an infinite score": {"score": np.where(np.arange(12) == 3, np.inf, good.score)},
        "parts without names": {"parts": np.zeros((12, 2))},
        "a log-probability that is not a number": {"behaviour": nan},
        "a value that is not a number": {"values": nan},
        "a trained token outside of the turns": {"turn": np.full(good.tokens, -1)},
        "a greedy sample that is trained on": {"greedy": np.arange(12) == 3},
    }


@pytest.mark.parametrize("name", bad_batches())
def test_a_batch_that_cannot_be_trained_on_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        replace(token_batch(0), **bad_batches()[name])


def test_what_is_masked_may_be_anything() -> None:
    batch = token_batch(0)
    replace(batch, behaviour=np.where(batch.trained, batch.behaviour, np.nan).astype(np.float32))
