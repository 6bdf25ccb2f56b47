"""Scores and rewards per token before advantages are made of them; float64 numpy.

Invariant: the token rewards of a sequence with trained tokens, summed over these, are its shaped score minus its KL penalty.
"""

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.algorithms.batch import Bool, Float32, Float64, Int64, last_trained, sequence_of, sequence_sums
from polyreme_trainer.algorithms.state import Moments


def normalise(scores: Float64, moments: Moments) -> Float64:
    """`(r - mean) / std`, float64 [n], by moments of all scores so far, these included.

    As the reward normalisation of Stiennon et al. 2020 (arXiv 2009.01325), section C.1, but with moments that follow the run.
    """
    return (scores - moments.mean) / moments.std


def overlong_penalty(lengths: Int64, longest: int, buffer: int, factor: float) -> Float64:
    """What is added to the score of a response of l tokens, float64 [n] in [-factor, 0].

    0 up to `longest - buffer` tokens, from there falling linearly to -factor at `longest`, and never below:
    DAPO, Yu et al. 2025 (arXiv 2503.14476), equation 13.

    Args:
        lengths: int64 [n].
        longest: tokens that a response may have.
        buffer: the last tokens of these, over which the penalty grows; at least 1.
        factor: the largest penalty.
    """
    return -factor * np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)


def repetition_penalty(ids: Int64, mask: Float32, offsets: Int64, ngram: int, factor: float) -> Float64:
    """`-factor` times the part of a response's n-grams that occurred in it before, float64 [n]; 0 for one without n-grams.

    As in Yeo et al. 2025 (arXiv 2502.03373), section 4.3, per sequence. An n-gram is of trained tokens, masked ones left out.

    Args:
        ids: int64 [t], the predicted tokens.
        mask: float32 [t].
        offsets: int64 [n + 1].
        ngram: tokens of an n-gram.
        factor: penalty of a response that repeats itself throughout.
    """
    penalty = np.zeros(len(offsets) - 1)
    for i in range(len(penalty)):
        part = slice(offsets[i], offsets[i + 1])
        tokens = ids[part][mask[part] > 0]
        if len(tokens) >= ngram:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, ngram)
            penalty[i] = -factor * (1 - len(np.unique(windows, axis=0)) / len(windows))
    return penalty


def token_rewards(
    scores: Float64, mask: Float32, offsets: Int64, process: NDArray[np.floating] | None = None, kl: Float64 | None = None
) -> Float64:
    """Rewards per token, float64 [t], 0 where masked: `process`, what the score has beyond it at the last trained token, minus `kl`.

    Args:
        scores: float64 [n], process rewards included.
        mask: float32 [t].
        offsets: int64 [n + 1].
        process: [t], process rewards. Those of masked tokens count in the score alone, and so reach the last trained token.
        kl: float64 [t], the KL penalty of each token, coefficient included.
    """
    trained, last = mask > 0, last_trained(mask, offsets)
    rewards = np.zeros(len(mask)) if process is None else np.where(trained, process, 0.0)
    rest, ends = scores - sequence_sums(rewards, offsets), last >= 0
    rewards[last[ends]] += rest[ends]
    if kl is not None:
        rewards[trained] -= kl[trained]
    return rewards


def distillation_advantages(teacher: Float32, student: Float32, mask: Float32, coef: float) -> Float64:
    """`coef (log p_teacher - log p_student)` of each sampled token, float64 [t], 0 where masked.

    On-policy distillation: the policy gradient of the reversed KL to the teacher with a discount of 0, Agarwal et al. 2023
    (arXiv 2306.13649). Exactly 0 where teacher and student agree.

    Args:
        teacher, student: float32 [t], log-probabilities of the sampled tokens.
        mask: float32 [t].
        coef: 1 for the KL itself.
    """
    advantages, trained = np.zeros(len(mask)), mask > 0
    advantages[trained] = coef * (teacher[trained].astype(np.float64) - student[trained])
    return advantages


def keep_tokens(dropped: Bool, offsets: Int64) -> Float32:
    """float32 [t], 0 for the tokens of the sequences that are dropped (bool [n]), else 1."""
    return (~dropped[sequence_of(offsets)]).astype(np.float32)
