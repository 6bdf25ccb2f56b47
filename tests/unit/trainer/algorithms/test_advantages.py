"""Every estimator is compared with naive loops and worked numbers, and tested with masked tokens and equal scores."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_trainer.algorithms import advantages as estimators
from polyreme_trainer.algorithms.groups import ABSOLUTE
from support.token_batches import offsets_of, ragged_mask

lengths = st.lists(st.integers(0, 8), min_size=1, max_size=6)
seeds = st.integers(0, 10_000)


def naive_gae(rewards, values, mask, offsets, gamma, lam, final):  # type: ignore[no-untyped-def]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i in range(len(offsets) - 1):
        carried, following = 0.0, final[i]
        for t in reversed(range(offsets[i], offsets[i + 1])):
            if mask[t] == 0:
                continue
            carried = rewards[t] + gamma * following - values[t] + gamma * lam[i] * carried
            following = values[t]
            advantages[t], returns[t] = carried, carried + values[t]
    return advantages, returns


@settings(deadline=None)
@given(lengths, seeds, st.sampled_from([0.0, 0.9, 1.0]), st.booleans())
def test_gae_is_the_recursion_over_trained_tokens(sizes: list[int], seed: int, gamma: float, bootstrap: bool) -> None:
    random = np.random.default_rng(seed)
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    rewards, values = random.normal(size=(2, len(mask)))
    lam, final = random.random(len(sizes)), random.normal(size=len(sizes)) * bootstrap
    found = estimators.gae(rewards, values, mask, offsets, gamma, lam, final if bootstrap else None)
    expected = naive_gae(rewards, values, mask, offsets, gamma, lam, final)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_gae_of_a_worked_sequence() -> None:
    # two trained tokens around a masked one, reward 1 at the end: delta = (0.5 * 0.4 - 0.2, 1 - 0.4) = (0, 0.6)
    rewards, values = np.array([0.0, 9.0, 1.0]), np.array([0.2, 9.0, 0.4])
    found, returns = estimators.gae(rewards, values, np.array([1.0, 0.0, 1.0]), np.array([0, 3]), 0.5, np.array([0.8]))
    np.testing.assert_allclose(found, [0.4 * 0.6, 0, 0.6])
    np.testing.assert_allclose(returns, [0.24 + 0.2, 0, 1.0])


def test_nothing_is_bootstrapped_past_an_end_from_the_next_sequence() -> None:
    values = np.array([0.0, 100.0])
    found, _ = estimators.gae(np.zeros(2), values, np.ones(2), np.array([0, 1, 2]), 1.0, np.ones(2))
    np.testing.assert_array_equal(found, [0.0, -100.0])


@settings(deadline=None)
@given(lengths, seeds, st.floats(0, 1))
def test_returns_are_discounted_per_trained_token(sizes: list[int], seed: int, gamma: float) -> None:
    random = np.random.default_rng(seed)
    offsets, mask = offsets_of(sizes), ragged_mask(random, sizes)
    rewards = random.normal(size=len(mask))
    expected = np.zeros(len(mask))
    for start, end in itertools.pairwise(offsets):
        trained = [t for t in range(start, end) if mask[t]]
        for k, t in enumerate(trained):
            expected[t] = sum(gamma**j * rewards[later] for j, later in enumerate(trained[k:]))
    np.testing.assert_allclose(estimators.discounted_returns(rewards, mask, offsets, gamma), expected, rtol=1e-10, atol=1e-12)


def test_length_adaptive_lambda() -> None:
    found = estimators.length_adaptive_lambda(np.array([0, 20, 40, 2000]), 0.05)
    np.testing.assert_allclose(found, [0, 0, 0.5, 0.99])


groups_of_scores = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=6), min_size=1, max_size=4)


def flat(rows: list[list[float]], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and groups in an order that mixes the groups."""
    order = np.random.default_rng(seed).permutation(sum(map(len, rows)))
    scores = np.array([x for row in rows for x in row])
    group = np.array([7 * g for g, row in enumerate(rows) for _ in row], dtype=np.int64)
    return scores[order], group[order]


def by_group(scores: np.ndarray, group: np.ndarray, advantage) -> list[float]:  # type: ignore[no-untyped-def]
    """`advantage(index, indices of the group)` for every sample, 0 in a group of equal scores."""
    result = []
    for i in range(len(scores)):
        peers = [j for j in range(len(scores)) if group[j] == group[i]]
        equal = math.isclose(max(scores[peers]), min(scores[peers]), rel_tol=1e-6, abs_tol=ABSOLUTE)
        result.append(0.0 if equal else advantage(i, peers))
    return result


@settings(deadline=None)
@given(groups_of_scores, seeds, st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-6, 1e-4]))
def test_group_estimators_are_what_their_papers_say(rows: list[list[float]], seed: int, ddof: int, floor: float) -> None:
    scores, group = flat(rows, seed)
    sizes = np.random.default_rng(seed).integers(1, 50, len(scores))

    def mean(js: list[int]) -> float:
        return math.fsum(scores[j] for j in js) / len(js)

    def normalised(i: int, js: list[int]) -> float:
        variance = math.fsum((scores[j] - mean(js)) ** 2 for j in js) / (len(js) - ddof)
        return (scores[i] - mean(js)) / (math.sqrt(variance) + floor)

    def without(i: int, js: list[int]) -> float:
        return scores[i] - math.fsum(scores[j] for j in js if j != i) / (len(js) - 1)

    def weighted(i: int, js: list[int]) -> float:
        return scores[i] - math.fsum(sizes[j] * scores[j] for j in js) / math.fsum(sizes[j] for j in js)

    def added(i: int, js: list[int]) -> float:
        return max(scores[j] for j in js) - max(scores[j] for j in js if j != i)

    for found, naive in (
        (estimators.best_of_group(scores, group), added),
        (estimators.group_normalised(scores, group, floor, ddof), normalised),
        (estimators.group_centred(scores, group), lambda i, js: scores[i] - mean(js)),
        (estimators.leave_one_out(scores, group), without),
        (estimators.length_weighted(scores, group, sizes), weighted),
    ):
        np.testing.assert_allclose(found, by_group(scores, group, naive), rtol=1e-6, atol=1e-9)


def test_worked_groups() -> None:
    scores, group = np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, dtype=np.int64)
    np.testing.assert_allclose(estimators.group_normalised(scores, group, 0.0, 0), [1, -1, -1, 1])
    np.testing.assert_allclose(estimators.group_normalised(scores, group, 0.0, 1), np.array([1, -1, -1, 1]) * math.sqrt(0.75))
    np.testing.assert_allclose(estimators.group_centred(scores, group), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(estimators.leave_one_out(scores, group), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    found = estimators.length_weighted(scores, group, np.array([3, 1, 1, 5]))
    np.testing.assert_allclose(found, [0.2, -0.8, -0.8, 0.2])
    np.testing.assert_array_equal(estimators.positives(scores, 0.0), [1, 0, 0, 1])


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_best_of_group_has_the_gradient_of_pass_at_k(chance: float) -> None:
    """Of k samples that are right with probability p: the mean over all outcomes is the derivative of 1 - (1 - p)^k."""
    k, gradient = 4, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=k):
        scores = np.array(outcome)
        slopes = np.where(scores == 1, 1 / chance, -1 / (1 - chance))  # of the samples' log-probabilities by p
        probability = np.where(scores == 1, chance, 1 - chance).prod()
        gradient += probability * (estimators.best_of_group(scores, np.zeros(k, dtype=np.int64)) * slopes).sum()
    assert gradient == pytest.approx(k * (1 - chance) ** (k - 1), rel=1e-12)


ESTIMATORS = {
    "best of group": estimators.best_of_group,
    "normalised": lambda scores, group: estimators.group_normalised(scores, group, 1e-6, 1),
    "centred": estimators.group_centred,
    "leave one out": estimators.leave_one_out,
    "length weighted": lambda scores, group: estimators.length_weighted(scores, group, np.arange(1, len(scores) + 1)),
    "per part": lambda scores, group: estimators.per_part(np.stack([scores, scores], 1), (0.3, 0.7), group, 1e-6, 1),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_scores_give_exactly_zero(name: str, score: float, n: int) -> None:
    scores = np.full(3 * n, score)
    scores[::2] *= 1 + 1e-12  # the effect of another order of summation
    assert (ESTIMATORS[name](scores, np.repeat(np.arange(3), n)) == 0).all()


def test_scores_that_cancel_to_nothing_are_equal() -> None:
    scores = np.array([0.1 + 0.2 - 0.3, 0.0])
    assert scores[0] != scores[1]
    assert (estimators.group_normalised(scores, np.zeros(2, dtype=np.int64), 0.0, 1) == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="group of one"):
        ESTIMATORS[name](np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]))


def test_the_greedy_baseline_is_the_greedy_score_of_the_group() -> None:
    scores, group = np.array([1.0, 0.25, 0.0, 3.0, 5.0]), np.array([0, 0, 1, 1, 1])
    greedy = np.array([False, True, False, True, True])
    np.testing.assert_allclose(estimators.greedy_baseline(scores, group, greedy), [0.25, 0.25, 4, 4, 4])
    with pytest.raises(ValueError, match="1 groups"):
        estimators.greedy_baseline(scores, group, np.array([False, True, False, False, False]))


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), seeds)
def test_parts_are_normalised_one_by_one(n: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    parts, weights = random.normal(size=(2 * n, k)) * 10.0 ** np.arange(k), tuple(random.random(k))
    group = np.repeat([0, 1], n)
    expected = np.zeros(2 * n)
    for i in range(2 * n):
        for column in range(k):
            peers = [parts[j, column] for j in range(2 * n) if group[j] == group[i]]
            mean = sum(peers) / n
            std = math.sqrt(sum((x - mean) ** 2 for x in peers) / (n - 1))
            expected[i] += weights[column] * (parts[i, column] - mean) / (std + 1e-6)
    np.testing.assert_allclose(estimators.per_part(parts, weights, group, 1e-6, 1), expected, rtol=1e-9)


@settings(deadline=None)
@given(lengths, seeds)
def test_whitening_is_over_trained_tokens_only(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = ragged_mask(random, sizes)
    x = np.where(mask > 0, random.normal(3, 2, len(mask)), np.nan)
    trained = [float(v) for v, m in zip(x, mask, strict=True) if m]
    found = estimators.whiten(x, mask)
    assert (found[mask == 0] == 0).all()
    if len(trained) > 1:
        mean = math.fsum(trained) / len(trained)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in trained) / len(trained) + 1e-8)
        np.testing.assert_allclose(found[mask > 0], [(v - mean) / std for v in trained], rtol=1e-9, atol=1e-12)
    else:
        assert (found == 0).all()


def test_whitening_equal_advantages_gives_exactly_zero() -> None:
    assert (estimators.whiten(np.full(7, 0.1), np.ones(7)) == 0).all()
