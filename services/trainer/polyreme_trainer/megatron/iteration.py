"""The input of one iteration of training, and its results.

Invariant: both are the same on every rank, except the measured seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyreme.experience.trained_samples import TrainedSamples
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batch import IntArray, Sequences


@dataclass(frozen=True)
class Iteration:
    """The data and settings of one iteration.

    Attributes:
        number: the iteration's number; the policy that it trains has version `number - 1`.
        sequences, tokens: the samples, as the models' sequences and as the algorithm's batch.
        steps: the sequences of each optimizer step.
        state: the algorithm's state from the previous iteration.
        lr, critic_lr: learning rates.
        trains_actor: False while only the critic warms up.
        mixed: the supervised rows of each optimizer step; empty when none are mixed in.
        ptx_coef: the weight of the supervised rows' loss.
    """

    number: int
    sequences: Sequences
    tokens: TokenBatch
    steps: list[IntArray]
    state: AlgorithmState
    lr: float
    critic_lr: float = 0.0
    trains_actor: bool = True
    mixed: Sequence[Sequences] = ()
    ptx_coef: float = 0.0


@dataclass(frozen=True)
class Trained:
    """The results of one iteration.

    Attributes:
        metrics: metrics by name, the same on every rank.
        state: the algorithm's state for the next iteration.
        samples: how the iteration used its samples.
        seconds: wall-clock seconds of each of PARTS on this rank.
    """

    metrics: dict[str, float | None]
    state: AlgorithmState
    samples: TrainedSamples
    seconds: dict[str, float]


PARTS = ("old_log_p", "reference_model", "critic_model", "adv", "update", "update_critic")
"""The timed parts of an iteration, with MindSpeed RL's names."""


def fresh_sequences(batch: Iteration) -> IntArray:
    """The indices of sequences that the policy before the step sampled completely.

    An answer that continued over a swap is not among them, not even its last tokens: these were sampled with keys and values of the older
    weights in the cache, so their probabilities differ by more than the engines do.
    """
    tokens = batch.tokens
    other = (tokens.version >= 0) & (tokens.version != batch.number - 1)
    stale = np.bincount(tokens.sequence_of, weights=other, minlength=len(tokens))
    return np.flatnonzero((stale == 0) & (batch.sequences.trained > 0))
