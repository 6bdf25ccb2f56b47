"""Batches of the training service, and which of them share a pass."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.learner.leader import join, split

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Sequences whose targets need not be their own next tokens.

    Attributes:
        inputs: int64 [n] each, the model's inputs.
        targets: int64 [n] each, the token to predict at each position; of a critic's batch any token.
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
        outputs: float32 [n] for each sequence, the log-probability of each target in nats, or a critic's value up to each input.
        loss: the sum of the loss over all positions.
    """

    outputs: Sequence[FloatArray]
    loss: float


def pack_call(call: LossCall) -> bytes:
    """A batch and its loss for another process. `read_call` is the inverse."""
    batch = call.batch
    lengths = [len(ids) for ids in batch.inputs]
    head = {"loss": call.loss, "options": dict(call.options), "lengths": lengths, "columns": list(batch.columns)}
    parts = [json.dumps(head).encode()]
    parts += [np.concatenate(ids).astype("<i8").tobytes() for ids in (batch.inputs, batch.targets)]
    return join([*parts, *(column.astype("<f4").tobytes() for column in batch.columns.values())])


def read_call(packed: bytes) -> LossCall:
    """The batch and the loss that `pack_call` has packed."""
    first, inputs, targets, *columns = split(packed)
    head = json.loads(first)
    ends = np.cumsum(head["lengths"])[:-1]
    given, wanted = (np.split(np.frombuffer(each, "<i8").astype(np.int64), ends) for each in (inputs, targets))
    values = [np.frombuffer(each, "<f4").astype(np.float32) for each in columns]
    batch = Batch(given, wanted, dict(zip(head["columns"], values, strict=True)))
    return LossCall(batch, head["loss"], head["options"])


def plan_passes(tokens: Mapping[str, int], budget: int, most: int) -> list[list[str]]:
    """Cuts models' batches in order into passes of at most `budget` tokens and `most` models. A larger one has its own passes."""
    passes, room = list[list[str]](), 0
    for model, count in tokens.items():
        if not passes or count > room or len(passes[-1]) == most:
            passes.append([])
            room = budget
        passes[-1].append(model)
        room -= count
    return passes
