"""Supervised rows mixed into the policy's optimizer steps: PPO-ptx, Ouyang et al. 2022 (arXiv 2203.02155), equation 2.

Invariant: an optimizer step's number determines its rows, so a resumed run continues with the next rows.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from polyreme_trainer.algorithms.batch import Int64
from polyreme_trainer.algorithms.metrics import Metrics, mean_of


def rows_of_step(rows: int, size: int, step: int, seed: Sequence[int]) -> Int64:
    """int64 [size], the rows of optimizer step 0, 1, ... of a run. Each pass over all rows draws its order from (seed, pass)."""
    positions = np.arange(step * size, (step + 1) * size, dtype=np.int64)
    chosen = np.empty(size, dtype=np.int64)
    for number in np.unique(positions // rows):
        inside = positions // rows == number
        chosen[inside] = np.random.default_rng([*seed, number]).permutation(rows)[positions[inside] % rows]
    return chosen


def ptx_loss(logprobs: Tensor, tokens: int, coef: float) -> tuple[Tensor, Metrics]:
    """`coef` times cross entropy, and the metric `ptx_loss` without it. The sum over micro-batches and ranks is the step's loss.

    Args:
        logprobs: [k], log-probabilities of a micro-batch's trained tokens at temperature 1.
        tokens: the number of trained tokens of the whole optimizer step's rows.
    """
    return -coef * logprobs.sum() / max(1, tokens), {"ptx_loss": mean_of(-logprobs)}
