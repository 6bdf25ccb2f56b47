"""Reduces token losses to one number: the coefficient of every token in the loss of its optimizer step.

A sequence is an episode, so an episode counts once, however many turns and trajectories it has. Tokens of the environment are
masked: they are neither in the loss nor in a divisor.

Invariant: coefficients are computed over the whole step, across all ranks and micro-batches, so `sum(coefficient * token loss)`
does not depend on how the step is split. Samples that the truncation mask or a correction removes still count in the divisors:
masking removes their gradient and leaves that of the other samples unchanged.
"""

import numpy as np

from polyreme.config.recipes.recipe import Aggregation
from polyreme_trainer.algorithms.batch import Float32, Int64, sequence_of, sequence_sums


def token_coefficients(mask: Float32, offsets: Int64, step: Int64, mode: Aggregation, constant: float | None = None) -> Float32:
    """float32 [t], 0 where a token is masked or its sequence is not in the step.

    S is the number of sequences of the step that have trained tokens, and l the number of a sequence's trained tokens:

    - token-mean: 1 / sum(l); every token has the same weight (DAPO, arXiv 2503.14476).
    - seq-mean-token-mean: 1 / (S l); every sequence has the same weight (GRPO, arXiv 2402.03300, equation 3). The trajectories of
      an episode share its weight in proportion to their trained tokens.
    - seq-mean-token-sum: 1 / S; a sequence is one action, whose log-probability is the sum over its tokens.
    - seq-mean-token-sum-norm: 1 / (S constant) (Dr. GRPO, arXiv 2503.20783).

    Args:
        mask: float32 [t], 1 where the token is trained on.
        offsets: int64 [n + 1].
        step: int64, indices of the sequences of the optimizer step.
        mode: the aggregation.
        constant: the divisor of seq-mean-token-sum-norm, in tokens: the most that the policy may sample in a trajectory.

    Raises:
        ValueError: seq-mean-token-sum-norm has no positive `constant`.
    """
    lengths = sequence_sums(mask > 0, offsets)
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[step] = True
    chosen &= lengths > 0
    count = max(1, int(chosen.sum()))
    if mode == "token-mean":
        divisor = np.full(len(lengths), max(1.0, lengths[chosen].sum()))
    elif mode == "seq-mean-token-mean":
        divisor = count * np.maximum(lengths, 1.0)
    elif mode == "seq-mean-token-sum":
        divisor = np.full(len(lengths), float(count))
    else:
        if constant is None or not constant > 0:
            raise ValueError(f"expected a positive constant for seq-mean-token-sum-norm; found {constant}")
        divisor = np.full(len(lengths), count * constant)
    return np.where(mask > 0, (chosen / divisor)[sequence_of(offsets)], 0.0).astype(np.float32)
