"""The rewards of a batch: scores after shaping, and rewards per token. Masked tokens have reward 0."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from polyreme.config.recipes.recipe import Shaping
from polyreme_trainer.algorithms import shaping
from polyreme_trainer.algorithms.batch import Float64, Int64, TokenBatch, sequence_sums
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


def shaped_scores(recipe: Shaping, batch: TokenBatch, longest: Int64, seen: Moments) -> tuple[Float64, Moments]:
    """Scores float64 [n] after every step of the recipe, and the moments of the scores so far.

    Args:
        recipe: the shaping steps.
        batch: the batch; it has `ids` when repetition is penalised.
        longest: int64 [n] or [], the largest number of tokens that the policy may sample in an episode.
        seen: the moments before this batch. Greedy samples do not update them.
    """
    scores = batch.score
    if recipe.normalise:
        seen = seen.update(scores[~batch.greedy])
        scores = shaping.normalise(scores, seen)
    if recipe.clip is not None:
        scores = np.clip(scores, *recipe.clip)
    # A greedy baseline has no trained token, and is shaped by all that it sampled.
    answered = batch.trained | (batch.greedy[batch.sequence_of] & (batch.version >= 0))
    if recipe.overlong is not None:
        buffer = np.maximum(1, np.round(recipe.overlong.buffer * longest))
        lengths = sequence_sums(answered, batch.offsets).astype(np.int64)
        scores = scores + shaping.overlong_penalty(lengths, longest, buffer, recipe.overlong.factor)
    scores = scores - recipe.truncation_penalty * batch.truncated
    if recipe.repetition is not None:
        ids = required(batch.ids, "ids")
        repeated = shaping.repetition_penalty(ids, answered, batch.offsets, recipe.repetition.ngram, recipe.repetition.factor)
        scores = scores + repeated
    return scores, seen


def rewards_of(batch: TokenBatch, scores: Float64, kl_penalty: Float64 | None, std: float = 1.0) -> Rewards:
    """The rewards from shaped scores and a batch's process rewards.

    Process rewards stay at their tokens and are part of the score. What shaping adds to the score goes to the last trained token.

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


def required(array: T | None, name: str) -> T:
    """The array. Raises ValueError when it is None."""
    if array is None:
        raise ValueError(f"expected a batch with {name}, which the recipe needs; found none")
    return array
