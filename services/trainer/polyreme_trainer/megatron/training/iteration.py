"""The input of one iteration of training, and its results.

The models compute trajectories, the algorithm sees episodes of one or more trajectories (`episodes_of`).

Invariant: both are the same on every rank, except the measured seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyreme.experience.record_codec import TrainedSamples
from polyreme_trainer.algorithms.batch import TokenBatch, sequence_sums
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import IntArray, Sequences


@dataclass(frozen=True)
class Iteration:
    """The data and settings of one iteration.

    Attributes:
        number: the iteration's number; the policy that it trains has version `number - 1`.
        sequences, tokens: the samples as the models' sequences and the algorithm's batch. A sequence has at least one prediction.
        steps: the sequences of each optimizer step, with all trajectories of an episode.
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


def episodes_of(sequences: Sequences, tokens: TokenBatch) -> IntArray:
    """int64 [n], the episode in the algorithm's batch that each of the models' n sequences is a trajectory of."""
    return np.searchsorted(tokens.offsets, sequences.offsets[:-1], side="right") - 1


def fresh_sequences(batch: Iteration) -> IntArray:
    """The indices of sequences that the policy before the step sampled completely.

    An answer that continued over a swap is not among them, not even its last tokens: these were sampled with keys and values of
    the older weights in the cache, so their probabilities differ by more than the engines do.
    """
    version, offsets = batch.tokens.version, batch.sequences.offsets
    stale = sequence_sums((version >= 0) & (version != batch.number - 1), offsets)
    return np.flatnonzero((stale == 0) & (batch.sequences.trained > 0))
