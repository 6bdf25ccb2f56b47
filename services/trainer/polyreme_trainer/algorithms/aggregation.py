"""From token losses to one number: the coefficient of every token in its optimizer step's loss.

Invariant: coefficients come from the whole step, over all ranks and micro-batches, so that `sum(coefficient * token loss)` does
not depend on how the step is cut. Samples that a filter or correction masks out still count in the divisors: masking removes
their gradient and leaves that of the others as it was.
"""

import numpy as np

from polyreme.config.recipe import Aggregation
from polyreme_trainer.algorithms.batch import Float32, Int64, sequence_of, sequence_sums


def token_coefficients(mask: Float32, offsets: Int64, step: Int64, mode: Aggregation, constant: float | None = None) -> Float32:
    """float32 [t], 0 where a token is masked or its sequence is not in the step.

    With S sequences of the step that have trained tokens, of l tokens each:

    - token-mean: 1 / sum(l), every token alike (DAPO, arXiv 2503.14476).
    - seq-mean-token-mean: 1 / (S l), every sequence alike (GRPO, arXiv 2402.03300, equation 3).
    - seq-mean-token-sum: 1 / S, the sum of a sequence's log-probabilities is one action's.
    - seq-mean-token-sum-norm: 1 / (S constant) (Dr. GRPO, arXiv 2503.20783).

    Args:
        mask: float32 [t], 1 where the token is trained on.
        offsets: int64 [n + 1].
        step: int64, the sequences of the optimizer step.
        mode: one of the four.
        constant: divisor of seq-mean-token-sum-norm, in tokens: the longest response that may be generated.

    Raises:
        ValueError: `constant` is missing where it is needed.
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
            raise ValueError(f"seq-mean-token-sum-norm needs a positive constant, not {constant}")
        divisor = np.full(len(lengths), count * constant)
    return np.where(mask > 0, (chosen / divisor)[sequence_of(offsets)], 0.0).astype(np.float32)
