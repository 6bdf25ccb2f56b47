"""Computes advantages from a batch and a recipe: shaping, rewards per token, then the estimator.

Invariant: masked tokens have advantage 0. Where an estimator compares a group's rewards and these are equal, its tokens have advantage 0,
whitened or not.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from polyreme.config.recipes.recipe import (
    AdvantageEstimator,
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
    Shaping,
    TurnNorm,
    Zero,
)
from polyreme_trainer.algorithms import advantages as estimators
from polyreme_trainer.algorithms import shaping
from polyreme_trainer.algorithms.batch import Float64, TokenBatch, sequence_sums
from polyreme_trainer.algorithms.groups import Groups
from polyreme_trainer.algorithms.state import Moments

T = TypeVar("T")


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch after shaping.

    Attributes:
        scores: float64 [n], after shaping.
        tokens: float64 [t], rewards per token; see `shaping.token_rewards`.
        process_minus_kl: float64 [t], process rewards minus the KL penalty, 0 where masked.
        totals: float64 [n], each sequence's score minus the KL penalty of its trained tokens.
    """

    scores: Float64
    process_minus_kl: Float64
    tokens: Float64
    totals: Float64


def shaped_scores(recipe: Shaping, batch: TokenBatch, longest: int, seen: Moments) -> tuple[Float64, Moments]:
    """Scores float64 [n] after every step of the recipe, and the moments of the scores so far.

    Args:
        recipe: the shaping steps.
        batch: the batch; it has `ids` when repetition is penalised.
        longest: the largest number of tokens that the policy may sample in an episode.
        seen: the moments before this batch. Greedy samples do not update them.
    """
    scores = batch.score
    if recipe.normalise:
        seen = seen.update(scores[~batch.greedy])
        scores = shaping.normalise(scores, seen)
    if recipe.clip is not None:
        scores = np.clip(scores, *recipe.clip)
    if recipe.overlong is not None:
        buffer = max(1, round(recipe.overlong.buffer * longest))
        scores = scores + shaping.overlong_penalty(batch.lengths, longest, buffer, recipe.overlong.factor)
    scores = scores - recipe.truncation_penalty * batch.truncated
    if recipe.repetition is not None:
        ids = required(batch.ids, "ids")
        scores = scores + shaping.repetition_penalty(
            ids, batch.mask, batch.offsets, recipe.repetition.ngram, recipe.repetition.factor
        )
    return scores, seen


def rewards_of(batch: TokenBatch, scores: Float64, kl_penalty: Float64 | None, std: float = 1.0) -> Rewards:
    """The rewards from shaped scores and a batch's process rewards.

    Process rewards stay at their tokens and remain part of the score. What shaping adds to the score goes to the last trained token.

    Args:
        scores: float64 [n], shaped scores, which include the process rewards.
        kl_penalty: float64 [t], the KL penalty, which includes its coefficient.
        std: the divisor by which the scores were normalised; process rewards are divided by it too.
    """
    none = np.zeros(batch.tokens)
    process = none if batch.token_rewards is None else np.where(batch.trained, batch.token_rewards / np.float64(std), 0.0)
    penalty = none if kl_penalty is None else np.where(batch.trained, kl_penalty, 0.0)
    tokens = shaping.token_rewards(scores, batch.mask, batch.offsets, process, penalty)
    return Rewards(scores, process - penalty, tokens, scores - sequence_sums(penalty, batch.offsets))


def estimate(recipe: AdvantageEstimator, batch: TokenBatch, rewards: Rewards) -> tuple[Float64, Float64 | None]:
    """Advantages [t] and, for an estimator with a critic, returns [t]; float64, 0 where masked.

    Raises:
        ValueError: the batch lacks an input of the estimator, or a group has too few samples to compare.
    """
    match recipe:
        case Gae():
            return _gae(recipe, batch, rewards.tokens)
        case Returns(gamma=gamma, whiten=whiten):
            returns = estimators.discounted_returns(rewards.tokens, batch.mask, batch.offsets, gamma)
            return (estimators.whiten(returns, batch.mask) if whiten else returns), None
        case GreedyBaseline():
            baseline = estimators.greedy_baseline(rewards.scores, batch.group, batch.greedy)
            returns = estimators.discounted_returns(rewards.tokens, batch.mask, batch.offsets, 1.0)
            return np.where(batch.trained, returns - baseline[batch.sequence_of], 0.0), None
        case Zero():
            return np.zeros(batch.tokens), None
    if batch.greedy.any():
        raise ValueError(f"expected no greedy samples, since {recipe.kind} compares samples of one distribution; found some")
    if isinstance(recipe, TurnNorm):
        turn = np.zeros(batch.tokens, dtype=np.int64) if batch.turn is None else batch.turn
        where = (turn, batch.mask, batch.offsets, batch.group)
        return estimators.turn_normalised(rewards.tokens, *where, recipe.gamma, recipe.std_floor, recipe.ddof), None
    per_token = np.where(batch.trained, _per_sample(recipe, batch, rewards.totals)[batch.sequence_of], 0.0)
    if isinstance(recipe, GroupMean | PerPart) and recipe.whiten:
        constant = _constant(recipe, batch, rewards.totals)[batch.sequence_of]
        per_token = np.where(constant, 0.0, estimators.whiten(per_token, batch.mask))
    return per_token, None


def _per_sample(recipe: AdvantageEstimator, batch: TokenBatch, totals: Float64) -> Float64:
    match recipe:
        case GroupNorm(std_floor=floor, ddof=ddof):
            return estimators.group_normalised(totals, batch.group, floor, ddof)
        case GroupMean():
            return estimators.group_centred(totals, batch.group)
        case LeaveOneOut():
            return estimators.leave_one_out(totals, batch.group)
        case LengthWeightedBaseline():
            return estimators.length_weighted(totals, batch.group, batch.lengths)
        case PerPart(std_floor=floor, ddof=ddof):
            return estimators.per_part(required(batch.parts, "parts"), batch.part_weights, batch.group, floor, ddof)
        case Positives(threshold=threshold):
            return estimators.positives(totals, threshold)
    raise ValueError(f"expected an estimator with one advantage per sample; found {recipe.kind}")


def _constant(recipe: GroupMean | PerPart, batch: TokenBatch, totals: Float64) -> np.ndarray:
    groups = Groups(batch.group)
    columns = [totals] if isinstance(recipe, GroupMean) else list(required(batch.parts, "parts").T)
    return np.all([groups.constant(column) for column in columns], axis=0)


def _gae(recipe: Gae, batch: TokenBatch, rewards: Float64) -> tuple[Float64, Float64]:
    values = required(batch.values, "values").astype(np.float64)
    final = None
    if recipe.bootstrap_truncated:
        final = np.where(batch.truncated, required(batch.final_values, "final_values"), 0.0)

    def run(lam: Float64) -> tuple[Float64, Float64]:
        return estimators.gae(rewards, values, batch.mask, batch.offsets, recipe.gamma, lam, final)

    if isinstance(recipe.lam, LengthAdaptive):
        lam = estimators.length_adaptive_lambda(batch.lengths, recipe.lam.alpha)
    else:
        lam = np.full(len(batch), recipe.lam)
    advantages, returns = run(lam)
    if recipe.value_lam is not None:
        _, returns = run(np.full(len(batch), recipe.value_lam))
    return (estimators.whiten(advantages, batch.mask) if recipe.whiten else advantages), returns


def required(array: T | None, name: str) -> T:
    """The array. Raises ValueError when it is None."""
    if array is None:
        raise ValueError(f"expected a batch with {name}, which the recipe needs; found none")
    return array
