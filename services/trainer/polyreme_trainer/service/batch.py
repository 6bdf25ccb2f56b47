"""Batches of the training service, and which of them share a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Sequences whose targets need not be their own next tokens.

    Attributes:
        inputs: int64 [n] each, the model's inputs.
        targets: int64 [n] each, the token to predict at each position.
        columns: name -> float32 [t], an input of the loss for every position of all sequences, one after the other.
    """

    inputs: Sequence[NDArray[np.int64]]
    targets: Sequence[NDArray[np.int64]]
    columns: Mapping[str, FloatArray]


@dataclass(frozen=True)
class LossCall:
    """A batch and the loss to compute on it, by its name in `losses`."""

    batch: Batch
    loss: str
    options: Mapping[str, float]


@dataclass(frozen=True)
class BatchResult:
    """What a batch has given.

    Attributes:
        logprobs: float32 [n] for each sequence, the log-probability of each target in nats.
        loss: the sum of the loss over all positions.
    """

    logprobs: Sequence[FloatArray]
    loss: float


def plan_passes(tokens: Mapping[str, int], budget: int, most: int) -> list[list[str]]:
    """Cuts the models' batches, in their order, into passes of at most `budget` tokens and `most` models. A larger batch has passes of its own."""
    passes, room = list[list[str]](), 0
    for model, count in tokens.items():
        if not passes or count > room or len(passes[-1]) == most:
            passes.append([])
            room = budget
        passes[-1].append(model)
        room -= count
    return passes
