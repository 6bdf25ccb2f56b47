"""Coefficients match the definition of each mean, and do not depend on the split of a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_trainer.algorithms.aggregation import token_coefficients
from support.token_batches import offsets_of, ragged_mask

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
CONSTANT = 12.0


def naive(losses: np.ndarray, mask: np.ndarray, offsets: np.ndarray, step: list[int], mode: str) -> float:
    sequences = []
    for i in step:
        tokens = [float(losses[t]) for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        if tokens:
            sequences.append(tokens)
    if not sequences:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    if mode == "seq-mean-token-mean":
        return sum(sum(s) / len(s) for s in sequences) / len(sequences)
    if mode == "seq-mean-token-sum":
        return sum(map(sum, sequences)) / len(sequences)
    return sum(sum(s) / CONSTANT for s in sequences) / len(sequences)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=8), st.integers(0, 10_000))
def test_the_weighted_sum_is_the_mean_of_that_name(mode: str, sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    losses = random.normal(size=len(mask))
    step = np.sort(random.permutation(len(sizes))[: random.integers(1, len(sizes) + 1)])
    coefficients = token_coefficients(mask, offsets, step, mode, CONSTANT)  # type: ignore[arg-type]
    assert coefficients.dtype == np.float32
    expected = naive(losses, mask, offsets, list(step), mode)
    assert float(coefficients @ losses) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    outside = ~np.isin(np.repeat(np.arange(len(sizes)), sizes), step)
    assert (coefficients[outside] == 0).all() and (coefficients[mask == 0] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_loss_does_not_depend_on_order_or_cut(mode: str, seed: int, parts: int) -> None:
    """Sequences are in another order and summed part by part, as by micro-batches and ranks."""
    random = np.random.default_rng(seed)
    sizes = [int(x) for x in random.integers(1, 9, 6)]
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    losses = random.normal(size=len(mask))
    whole = float(token_coefficients(mask, offsets, np.arange(6), mode, CONSTANT) @ losses)  # type: ignore[arg-type]
    order = random.permutation(6)
    where = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in order])
    moved = offsets_of([sizes[i] for i in order])
    coefficients = token_coefficients(mask[where], moved, np.arange(6), mode, CONSTANT)  # type: ignore[arg-type]
    tokens = np.repeat(np.arange(6), [sizes[i] for i in order])
    pieces = [tokens % parts == part for part in range(parts)]
    assert sum(float(coefficients[p] @ losses[where][p]) for p in pieces) == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_worked_coefficients() -> None:
    mask, offsets = np.array([1, 1, 0, 1], dtype=np.float32), np.array([0, 3, 4, 4])
    step = np.arange(3)  # the third sequence has no token and counts for nothing
    np.testing.assert_allclose(token_coefficients(mask, offsets, step, "token-mean"), [1 / 3, 1 / 3, 0, 1 / 3])
    np.testing.assert_allclose(token_coefficients(mask, offsets, step, "seq-mean-token-mean"), [1 / 4, 1 / 4, 0, 1 / 2])
    np.testing.assert_allclose(token_coefficients(mask, offsets, step, "seq-mean-token-sum"), [1 / 2, 1 / 2, 0, 1 / 2])


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_the_constant_length_must_be_given(constant: float | None) -> None:
    with pytest.raises(ValueError, match="constant"):
        token_coefficients(np.ones(1, np.float32), np.array([0, 1]), np.arange(1), "seq-mean-token-sum-norm", constant)
