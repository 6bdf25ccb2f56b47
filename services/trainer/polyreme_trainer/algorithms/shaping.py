"""Shapes scores and token rewards before advantages are computed; float64 numpy.

Invariant: for a sequence with trained tokens, the token rewards sum to its shaped score minus its KL penalty.
"""

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.algorithms.batch import Bool, Float32, Float64, Int64, last_trained, sequence_sums
from polyreme_trainer.algorithms.state import Moments


def normalise(scores: Float64, moments: Moments) -> Float64:
    """`(r - mean) / std`, float64 [n], with the moments of all scores so far, including these.

    The reward normalisation of Stiennon et al. 2020 (arXiv 2009.01325), section C.1, with running moments.
    """
    return (scores - moments.mean) / moments.std


def overlong_penalty(lengths: Int64, longest: Int64, buffer: Float64, factor: float) -> Float64:
    """The addition to each score for the number of sampled tokens, float64 [n] in [-factor, 0].

    It is 0 up to `longest - buffer` tokens and falls linearly to -factor at `longest`: DAPO, Yu et al. 2025 (arXiv 2503.14476),
    equation 13.

    Args:
        lengths: int64 [n], sampled tokens of each episode.
        longest: [n] or [], the largest number of tokens that the policy may sample in an episode.
        buffer: [n] or [], the number of tokens before `longest` over which the penalty grows; at least 1.
        factor: the largest penalty.
    """
    return -factor * np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)


def repetition_penalty(ids: Int64, mask: Float32 | Bool, offsets: Int64, ngram: int, factor: float) -> Float64:
    """`-factor` times the fraction of a response's n-grams that are repetitions, float64 [n]; 0 for a response without n-grams.

    Yeo et al. 2025 (arXiv 2502.03373), section 4.3, per sequence. N-grams consist of trained tokens; masked ones are skipped.

    Args:
        ids: int64 [t], the predicted tokens.
        mask: [t], 0 for tokens that do not count.
        offsets: int64 [n + 1].
        ngram: the n of the n-grams.
        factor: the penalty's limit for a response that repeats one n-gram.
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
    """Rewards per token, float64 [t], 0 where masked: `process` minus `kl`, and the rest of the score at the last trained token.

    Args:
        scores: float64 [n], scores that include the process rewards.
        mask: float32 [t].
        offsets: int64 [n + 1].
        process: [t], process rewards. Those of masked tokens count in the score only, which puts them at the last trained token.
        kl: float64 [t], the KL penalty of each token, which includes its coefficient.
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

    On-policy distillation: the policy gradient of the reverse KL to the teacher with a discount of 0, Agarwal et al. 2023
    (arXiv 2306.13649). Exactly 0 where teacher and student agree.

    The KL is that of the policy which the step moves, also for samples of an older one: their ratio to the sampler corrects which
    tokens were drawn, not what the policy thinks of them.

    Args:
        teacher: float32 [t], log-probabilities of the sampled tokens under the teacher.
        student: float32 [t], under the policy before the iteration's first optimizer step. All at temperature 1.
        mask: float32 [t].
        coef: the weight of the distillation; 1 for the KL itself.
    """
    advantages, trained = np.zeros(len(mask)), mask > 0
    advantages[trained] = coef * (teacher[trained].astype(np.float64) - student[trained])
    return advantages
