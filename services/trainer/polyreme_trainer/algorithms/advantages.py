"""Advantage estimators, from rewards to advantages, in float64 numpy.

Some estimators take rewards per token and the critic's values; the others take one score per sample and compare it with the other
samples of its group. A sample is an episode, which may have several turns in several trajectories (see `batch`).

Invariant: a masked token has advantage 0 and no influence. Estimators that compare a group's scores give exactly 0 when these are
equal, whitened or not.

A further estimator is a class in `polyreme.config.recipes.recipe`, its formula here, and a line in ESTIMATORS.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme.config.recipes.recipe import (
    BestOfGroup,
    Estimator,
    Gae,
    GreedyBaseline,
    GroupMean,
    GroupNorm,
    LeaveOneOut,
    LengthAdaptive,
    LengthWeightedBaseline,
    PerPart,
    Positives,
    Returns,
    TurnNorm,
    Zero,
)
from polyreme_trainer.algorithms.batch import Float64, Int64, TokenBatch, sequence_of, sequence_sums
from polyreme_trainer.algorithms.groups import Groups, equal
from polyreme_trainer.algorithms.rewards import Rewards, required

WHITEN_EPSILON = 1e-8
"""Added to the variance of whitened advantages."""

Mask = NDArray[np.floating]


def gae(
    rewards: Float64, values: Float64, mask: Mask, offsets: Int64, gamma: float, lam: Float64, final_values: Float64 | None = None
) -> tuple[Float64, Float64]:
    """Generalised advantage estimation, Schulman et al. 2015 (arXiv 1506.02438), equation 16, over the trained tokens.

    `delta_t = r_t + gamma V_next - V_t` and `A_t = delta_t + gamma lam A_next`, where "next" is the next trained token of the
    sequence, so masked tokens are skipped. After the last trained token the value is 0, or `final_values`.

    Args:
        rewards, values: float64 [t].
        mask: [t], 1 where the token is trained on.
        offsets: int64 [n + 1].
        gamma: discount per trained token.
        lam: float64 [n], lambda of each sequence.
        final_values: float64 [n], the value after the last trained token; None for 0, since the sequence has ended.

    Returns:
        Advantages and returns `A + V`, float64 [t], 0 where masked. Neither is whitened.
    """
    trained = mask > 0
    counts = sequence_sums(trained, offsets).astype(np.int64)
    ends = np.cumsum(counts)
    v = values[trained]
    following = np.zeros_like(v)
    following[:-1] = v[1:]
    following[ends[counts > 0] - 1] = 0.0 if final_values is None else final_values[counts > 0]
    advantages = np.zeros(len(mask))
    advantages[trained] = _discounted_sums(rewards[trained] + gamma * following - v, counts, gamma * lam)
    returns = np.zeros(len(mask))
    returns[trained] = advantages[trained] + v
    return advantages, returns


def discounted_returns(rewards: Float64, mask: Mask, offsets: Int64, gamma: float) -> Float64:
    """`G_t = r_t + gamma G_next` over the trained tokens of each sequence, float64 [t], 0 where masked (REINFORCE)."""
    trained = mask > 0
    counts = sequence_sums(trained, offsets).astype(np.int64)
    returns = np.zeros(len(mask))
    returns[trained] = _discounted_sums(rewards[trained], counts, np.full(len(counts), gamma))
    return returns


def _discounted_sums(values: Float64, counts: Int64, decay: Float64) -> Float64:
    """`s_k = x_k + decay s_(k+1)` within each run of `counts[i]` values. Vectorised: one step per token of the longest run."""
    sums = values.copy()
    order = np.argsort(-counts, kind="stable")
    ends, descending = np.cumsum(counts)[order], -counts[order]
    for back in range(2, int(counts.max(initial=0)) + 1):
        active = int(np.searchsorted(descending, -back, side="right"))  # runs with at least `back` values come first
        position = ends[:active] - back
        sums[position] += decay[order[:active]] * sums[position + 1]
    return sums


def length_adaptive_lambda(lengths: Int64, alpha: float) -> Float64:
    """float64 [n], `max(0, 1 - 1 / (alpha l))` for l-token responses: VAPO, Yue et al. 2025 (arXiv 2504.05118), section 4.2."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)))


def group_normalised(scores: Float64, group: Int64, floor: float, ddof: int) -> Float64:
    """`(r - mean) / (std + floor)` within the group: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.

    Args:
        scores: float64 [n].
        group: int64 [n].
        floor: added to the deviation, so that nearly equal scores do not become full-size advantages.
        ddof: 1 for the unbiased deviation, 0 for the population's.

    Raises:
        ValueError: a group has one sample.
    """
    groups = _with_peers(group)
    std = np.where(groups.constant(scores), np.inf, groups.std(scores, ddof) + floor)
    return (scores - groups.mean(scores)) / std


def group_centred(scores: Float64, group: Int64) -> Float64:
    """`r - mean` within the group: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.2. Raises as `group_normalised`."""
    groups = _with_peers(group)
    return np.where(groups.constant(scores), 0.0, scores - groups.mean(scores))


def leave_one_out(scores: Float64, group: Int64) -> Float64:
    """`r` minus the mean of the group's others: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740). Raises as `group_normalised`."""
    groups = _with_peers(group)
    sizes = groups.sizes[groups.member_of]
    return group_centred(scores, group) * sizes / (sizes - 1)


def length_weighted(scores: Float64, group: Int64, lengths: Int64) -> Float64:
    """`r - sum(l r) / sum(l)` within the group, l being the number of trained tokens: OPO, Hao et al. 2025 (arXiv 2505.23585).

    Raises as `group_normalised`. In a group without trained tokens, advantages are 0.
    """
    groups = _with_peers(group)
    weights = groups.sums(lengths.astype(np.float64))
    baseline = groups.sums(lengths * scores) / np.maximum(weights, 1.0)
    unmoved = groups.constant(scores) | (weights == 0)[groups.member_of]
    return np.where(unmoved, 0.0, scores - baseline[groups.member_of])


def best_of_group(scores: Float64, group: Int64) -> Float64:
    """The group's best score minus the best score of its other samples: 0 for all samples but a single best one.

    The leave-one-out gradient of the group's expected maximum, Tang et al. 2025 (arXiv 2503.19595). Raises as `group_normalised`.
    """
    groups, advantages = _with_peers(group), np.zeros(len(scores))
    order = np.lexsort((scores, groups.member_of))
    last = np.cumsum(groups.sizes) - 1  # of each group, the position of its best score
    advantages[order[last]] = scores[order[last]] - scores[order[last - 1]]
    return np.where(groups.constant(scores), 0.0, advantages)


def greedy_baseline(scores: Float64, group: Int64, greedy: NDArray[np.bool_]) -> Float64:
    """float64 [n], the mean score of the greedy samples of the same prompt: ReMax, Li et al. 2023 (arXiv 2310.10505).

    Raises:
        ValueError: a group has no greedy sample.
    """
    groups = Groups(group)
    count = groups.sums(greedy.astype(np.float64))
    if (count == 0).any():
        raise ValueError(f"expected a greedy sample in every group; found {int((count == 0).sum())} groups without one")
    baseline: Float64 = (groups.sums(np.where(greedy, scores, 0.0)) / count)[groups.member_of]
    return baseline


def per_part(parts: Float64, weights: tuple[float, ...], group: Int64, floor: float, ddof: int) -> Float64:
    """The weighted sum of the reward's parts, each normalised within its group: GDPO, Liu et al. 2026 (arXiv 2601.05242).

    Args:
        parts: float64 [n, k].
        weights: k weights.

    Raises as `group_normalised`.
    """
    columns = [w * group_normalised(part, group, floor, ddof) for part, w in zip(parts.T, weights, strict=True)]
    return np.sum(columns, axis=0) if columns else np.zeros(len(parts))


def turn_normalised(
    rewards: Float64, turn: Int64, mask: Mask, offsets: Int64, group: Int64, gamma: float, floor: float, ddof: int
) -> Float64:
    """The return from each turn on, normalised over all turns of the group: Kevin, Baronio et al. 2025 (arXiv 2507.11948).

    `G_k = R_k + gamma G_(k+1)`, where R_k is the sum of turn k's token rewards. Each turn of each episode is compared with all
    turns of the group's episodes as `group_normalised` compares samples. Turns without trained tokens do not count; a turn
    without another one to compare with has advantage 0.

    Args:
        rewards: float64 [t].
        turn: int64 [t], the number of the token's turn within its sequence, not decreasing over the trained tokens.
        mask: [t].
        offsets: int64 [n + 1].
        group: int64 [n].
        gamma: discount per turn.

    Returns:
        float64 [t], 0 where masked.
    """
    trained, result = np.flatnonzero(mask > 0), np.zeros(len(mask))
    if not len(trained):
        return result
    width = turn[trained].max() + 1
    turns, turn_of = np.unique(sequence_of(offsets)[trained] * width + turn[trained], return_inverse=True)
    counts = np.bincount(turns // width, minlength=len(offsets) - 1)
    sums = np.bincount(turn_of, weights=rewards[trained]).astype(np.float64, copy=False)
    returns = _discounted_sums(sums, counts, np.full(len(counts), gamma))
    group_of = group[turns // width]
    groups, advantages = Groups(group_of), np.zeros(len(turns))
    compared = groups.sizes[groups.member_of] > 1
    advantages[compared] = group_normalised(returns[compared], group_of[compared], floor, ddof)
    result[trained] = advantages[turn_of]
    return result


def positives(scores: Float64, threshold: float) -> Float64:
    """1 for scores above the threshold, else 0. RAFT, Dong et al. 2023 (arXiv 2304.06767), imitates only the accepted samples."""
    return (scores > threshold).astype(np.float64)


def whiten(advantages: Float64, mask: Mask) -> Float64:
    """Advantages scaled to mean 0 and population variance 1 over all trained tokens of the batch; float64 [t], 0 where masked.

    The batch is a whole iteration, so the statistics are global. Equal advantages become exactly 0.
    """
    trained = mask > 0
    result, x = np.zeros(len(advantages)), advantages[trained]
    if len(x) and not equal(x.min(), x.max()):
        result[trained] = (x - x.mean()) / np.sqrt(x.var() + WHITEN_EPSILON)
    return result


def _with_peers(group: Int64) -> Groups:
    groups = Groups(group)
    if (groups.sizes < 2).any():
        raise ValueError("expected at least two samples in every group; found a group of one")
    return groups


Estimates = tuple[Float64, Float64 | None]
"""Advantages [t] and, for an estimator with a critic, returns [t]; float64, 0 where masked."""


def estimate(recipe: Estimator, batch: TokenBatch, rewards: Rewards) -> Estimates:
    """The advantages of a batch.

    Raises:
        ValueError: the batch lacks an input of the estimator, or a group has too few samples to compare.
    """
    if not recipe.admits_greedy and batch.greedy.any():
        raise ValueError(f"expected no greedy samples, since {recipe.kind} compares samples of one distribution; found some")
    return ESTIMATORS[type(recipe)](recipe, batch, rewards)


def _gae(recipe: Gae, batch: TokenBatch, rewards: Rewards) -> Estimates:
    values = required(batch.values, "values").astype(np.float64)
    final = None
    if recipe.bootstrap_truncated:
        final = np.where(batch.truncated, required(batch.final_values, "final_values"), 0.0)

    def run(lam: Float64) -> tuple[Float64, Float64]:
        return gae(rewards.tokens, values, batch.mask, batch.offsets, recipe.gamma, lam, final)

    if isinstance(recipe.lam, LengthAdaptive):
        lam = length_adaptive_lambda(batch.lengths, recipe.lam.alpha)
    else:
        lam = np.full(len(batch), recipe.lam)
    advantages, returns = run(lam)
    if recipe.value_lam is not None:
        _, returns = run(np.full(len(batch), recipe.value_lam))
    return (whiten(advantages, batch.mask) if recipe.whiten else advantages), returns


def _returns(recipe: Returns, batch: TokenBatch, rewards: Rewards) -> Estimates:
    returns = discounted_returns(rewards.tokens, batch.mask, batch.offsets, recipe.gamma)
    return (whiten(returns, batch.mask) if recipe.whiten else returns), None


def _greedy_baseline(recipe: GreedyBaseline, batch: TokenBatch, rewards: Rewards) -> Estimates:
    baseline = greedy_baseline(rewards.scores, batch.group, batch.greedy)
    returns = discounted_returns(rewards.tokens, batch.mask, batch.offsets, 1.0)
    return np.where(batch.trained, returns - baseline[batch.sequence_of], 0.0), None


def _turn_norm(recipe: TurnNorm, batch: TokenBatch, rewards: Rewards) -> Estimates:
    turn = np.zeros(batch.tokens, dtype=np.int64) if batch.turn is None else batch.turn
    where = (turn, batch.mask, batch.offsets, batch.group)
    return turn_normalised(rewards.tokens, *where, recipe.gamma, recipe.std_floor, recipe.ddof), None


def _per_part(recipe: PerPart, batch: TokenBatch, rewards: Rewards) -> Estimates:
    parts = required(batch.parts, "parts")
    advantages = per_part(parts, batch.part_weights, batch.group, recipe.std_floor, recipe.ddof)
    return _whitened(_on_tokens(advantages, batch), parts, batch) if recipe.whiten else _on_tokens(advantages, batch), None


def _group_mean(recipe: GroupMean, batch: TokenBatch, rewards: Rewards) -> Estimates:
    advantages = _on_tokens(group_centred(rewards.totals, batch.group), batch)
    return _whitened(advantages, rewards.totals[:, None], batch) if recipe.whiten else advantages, None


def _whitened(advantages: Float64, columns: Float64, batch: TokenBatch) -> Float64:
    """Advantages [t] whitened over the batch. Those of a group in which each of `columns` [n, k] is equal stay 0."""
    groups = Groups(batch.group)
    constant = np.all([groups.constant(column) for column in columns.T], axis=0)[batch.sequence_of]
    return np.where(constant, 0.0, whiten(advantages, batch.mask))


def _on_tokens(advantages: Float64, batch: TokenBatch) -> Float64:
    """float64 [t] from the advantages [n] of whole samples."""
    return np.where(batch.trained, advantages[batch.sequence_of], 0.0)


def _of_samples(formula: Callable[[Any, TokenBatch, Float64], Float64]) -> Callable[[Any, TokenBatch, Rewards], Estimates]:
    """An estimator with one advantage per sample: `formula(recipe, batch, totals [n])` gives float64 [n]."""
    return lambda recipe, batch, rewards: (_on_tokens(formula(recipe, batch, rewards.totals), batch), None)


ESTIMATORS: Mapping[type[Estimator], Callable[[Any, TokenBatch, Rewards], Estimates]] = {
    Gae: _gae,
    Returns: _returns,
    GreedyBaseline: _greedy_baseline,
    TurnNorm: _turn_norm,
    PerPart: _per_part,
    GroupMean: _group_mean,
    GroupNorm: _of_samples(lambda own, batch, totals: group_normalised(totals, batch.group, own.std_floor, own.ddof)),
    LeaveOneOut: _of_samples(lambda own, batch, totals: leave_one_out(totals, batch.group)),
    LengthWeightedBaseline: _of_samples(lambda own, batch, totals: length_weighted(totals, batch.group, batch.lengths)),
    BestOfGroup: _of_samples(lambda own, batch, totals: best_of_group(totals, batch.group)),
    Positives: _of_samples(lambda own, batch, totals: positives(totals, own.threshold)),
    Zero: _of_samples(lambda own, batch, totals: np.zeros(len(batch))),
}
