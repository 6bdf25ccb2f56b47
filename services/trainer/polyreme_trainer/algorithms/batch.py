"""The episodes of one iteration as flat per-token arrays, and the advantages computed from them.

A sequence is one episode: the predictions of its trajectories, one after the other. An episode of one turn is one response. A
trajectory of L tokens has L - 1 predictions; prediction k is of token k + 1. Every per-token array has one entry per prediction,
and the entries of sequence i are at `offsets[i]:offsets[i + 1]`. The arrays are independent of padding, packing and ranks.

Tokens of the prompt and of the environment are masked, so "the next trained token" of a turn's last token is the first one of the
next turn, also when that is in the episode's next trajectory.

Invariant: entries where `mask` is 0 have no influence on any result, except for the shaping of a greedy baseline. An episode
counts once, however many trajectories it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.algorithms.state import INITIAL, AlgorithmState

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class TokenBatch:
    """n episodes, each one sequence, with t predictions in all.

    Attributes:
        offsets: int64 [n + 1], from 0 to t, not decreasing.
        mask: float32 [t], 1 where the predicted token is trained on, else 0.
        behaviour: float32 [t], log-probability of the token under the policy that sampled it.
        version: int32 [t], version of the policy that sampled the token; -1 for tokens of the prompt and of the environment.
        group: int64 [n], equal for the episodes of one prompt.
        score: float64 [n], the reward of the whole episode, finite.
        truncated: bool [n], whether a bound ended the episode: the length limit, or one on its turns, tokens or time.
        greedy: bool [n], whether the episode is greedy and serves as a baseline (ReMax); it then has no trained token.
        old: float32 [t], log-probability under the policy before the iteration's first optimizer step.
        reference: float32 [t], under the frozen reference policy.
        teacher: float32 [t], under the teacher of a distillation.
        values: float32 [t], the critic's value of the state before the token.
        final_values: float32 [n], the critic's value of the state after the last token.
        token_rewards: float32 [t], process rewards, and each turn's reward at the turn's last token: a part of the score. The
            rest of it belongs to the last trained token.
        turn: int64 [t], the token's turn within its episode, from 0; -1 outside of the turns. None: every episode is one turn.
        ids: int64 [t], the predicted tokens.
        trajectories: int64 [n], the number of trajectories of each episode. None: every episode has one.
        parts: float64 [n, k], the named components of the reward, unweighted.
        part_names: k names.
        part_weights: k weights.
    """

    offsets: Int64
    mask: Float32
    behaviour: Float32
    version: Int32
    group: Int64
    score: Float64
    truncated: Bool
    greedy: Bool
    old: Float32 | None = None
    reference: Float32 | None = None
    teacher: Float32 | None = None
    values: Float32 | None = None
    final_values: Float32 | None = None
    token_rewards: Float32 | None = None
    turn: Int64 | None = None
    ids: Int64 | None = None
    trajectories: Int64 | None = None
    parts: Float64 | None = None
    part_names: tuple[str, ...] = ()
    part_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n, t = len(self), self.tokens
        per_token = ("mask", "behaviour", "version", "old", "reference", "teacher", "values", "token_rewards", "turn", "ids")
        per_sequence = ("group", "score", "truncated", "greedy", "final_values", "trajectories")
        for names, length in ((per_token, t), (per_sequence, n)):
            for name in names:
                array = getattr(self, name)
                if array is not None and array.shape != (length,):
                    raise ValueError(f"{name} has shape {array.shape}, not ({length},)")
        if self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise ValueError("offsets do not start at 0 or fall")
        if not np.isin(self.mask, (0, 1)).all():
            raise ValueError("mask holds values other than 0 and 1")
        if not np.isfinite(self.score).all():
            raise ValueError("a score is not finite")
        if self.parts is not None and not (
            self.parts.shape == (n, len(self.part_names)) and len(self.part_names) == len(self.part_weights)
        ):
            raise ValueError(f"{self.parts.shape} parts, {len(self.part_names)} names, {len(self.part_weights)} weights")
        for name in ("behaviour", "old", "reference", "teacher", "values", "token_rewards"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array[self.trained]).all():
                raise ValueError(f"{name} is not finite at a trained token")
        if self.turn is not None and (self.turn[self.trained] < 0).any():
            raise ValueError("a trained token is in no turn")
        if self.lengths[self.greedy].any():
            raise ValueError("a greedy sequence has trained tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """The number of predictions, t."""
        return int(self.offsets[-1])

    @cached_property
    def sequence_of(self) -> Int64:
        """int64 [t], the sequence that each prediction belongs to."""
        return sequence_of(self.offsets)

    @cached_property
    def trained(self) -> Bool:
        """bool [t], where `mask` is 1."""
        trained: Bool = self.mask > 0
        return trained

    @cached_property
    def lengths(self) -> Int64:
        """int64 [n], the number of trained tokens of each sequence."""
        return sequence_sums(self.trained, self.offsets).astype(np.int64)

    @property
    def policy(self) -> Float32:
        """Log-probabilities under the policy before the step: `old` if computed, else the sampler's."""
        return self.behaviour if self.old is None else self.old


@dataclass(frozen=True)
class Advantages:
    """The advantages of a batch.

    Attributes:
        advantages: float32 [t], 0 where the token is not trained on.
        returns: float32 [t], the critic's targets; None without a critic.
        weight: float32 [t], factor of each token's loss: 0 for tokens of samples that are masked out, else 1.
        metrics: name -> (sum, weight) of the whole iteration. They are equal on every rank and must not be summed over ranks.
        state: the algorithm's state for the next iteration.
    """

    advantages: Float32
    returns: Float32 | None
    weight: Float32
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    state: AlgorithmState = INITIAL


def sequence_of(offsets: Int64) -> Int64:
    """int64 [t], the index of the sequence that each prediction belongs to."""
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))


def sequence_sums(values: NDArray[np.generic], offsets: Int64) -> Float64:
    """float64 [n], the sum of `values` [t] over each sequence; 0 for an empty sequence."""
    sums = np.bincount(sequence_of(offsets), weights=values.astype(np.float64), minlength=len(offsets) - 1)
    return sums.astype(np.float64, copy=False)


def last_trained(mask: Float32, offsets: Int64) -> Int64:
    """int64 [n], the position of each sequence's last trained prediction; -1 for a sequence without one."""
    positions = np.flatnonzero(mask > 0)
    last = np.full(len(offsets) - 1, -1, dtype=np.int64)
    np.maximum.at(last, sequence_of(offsets)[positions], positions)
    return last
