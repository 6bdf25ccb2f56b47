"""Roles: actor, critic, reference and moving average are one kind of thing, a model with an optimizer where it is trained.

Invariant: a role without an optimizer changes between two iterations only, if at all. Checkpoints, resumes and metrics iterate over roles and know none by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.megatron.batch import FloatArray, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.model import ShardedModel
from polyreme_trainer.megatron.optimizer import Adam, Optimizer
from polyreme_trainer.megatron.shard import DataShard

Model = TypeVar("Model", bound=ShardedModel)

Forward = Callable[[MicroBatch], Tensor]
"""A model's output for a micro-batch: one number per trained token, fp32 [k], in the order of `MicroBatch.tokens`, or several: [n, k]."""

Loss = Callable[[MicroBatch, Tensor], Tensor]
"""The scalar to differentiate of one micro-batch, given the model's output for it."""


@dataclass(frozen=True)
class LossTerm:
    """One of several terms of an optimizer step: the sequences `indices` and the loss on them, see `Role.update`."""

    sequences: Sequences
    indices: IntArray
    loss: Loss
    forward: Forward | None = None


class Role(Generic[Model]):
    """A model, its optimizer when it is trained, and how it answers for a micro-batch.

    Args:
        name: of its files in a checkpoint.
        model: this rank's shard.
        forward: the model's number for each trained token.
        shard: this rank's share of batches.
    """

    def __init__(self, name: str, model: Model, forward: Forward, shard: DataShard) -> None:
        self.name, self.model, self.forward, self.shard = name, model, forward, shard
        self.optimizer: Optimizer | None = None

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.model.arch.parameters

    def make_optimizer(self, adam: Adam) -> None:
        """Lets the role be trained, with fresh moments; in bfloat16 a full-precision copy of the weights is taken now."""
        self.optimizer = Optimizer(self.model, adam)

    @torch.no_grad()
    def infer(self, sequences: Sequences, indices: IntArray) -> FloatArray:
        """The model's numbers for the trained tokens of `indices`, float32 [t], 0 elsewhere; the same on every data rank."""
        result = torch.zeros(int(sequences.offsets[-1]), dtype=torch.float32, device=self.shard.device)
        for batch in self.shard.micro_batches(sequences, indices, self.parameters):
            result[torch.from_numpy(batch.tokens).to(result.device)] = self.forward(batch)
        return self.shard.sum(result).cpu().numpy()

    def update(
        self,
        sequences: Sequences,
        indices: IntArray,
        loss: Loss,
        lr: float,
        forward: Forward | None = None,
        beside: Sequence[LossTerm] = (),
    ) -> float:
        """One optimizer step on `indices`, shared out over the data ranks.

        Args:
            loss: its values add up over all micro-batches and ranks to the step's loss.
            forward: what the loss sees of the model; None: the role's own.
            beside: further parts, whose losses are added.

        Returns:
            The norm of the whole gradient before clipping.
        """
        assert self.optimizer is not None, f"role {self.name} is frozen"
        self.optimizer.zero_grad()
        for part in (LossTerm(sequences, indices, loss, forward), *beside):
            for batch in self.shard.micro_batches(part.sequences, part.indices, self.parameters):
                part.loss(batch, (part.forward or self.forward)(batch)).backward()
        self.optimizer.set_lr(lr)
        return self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """This rank's weights and, when it is trained, moments: plain containers and tensors (not copies)."""
        state: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave on a rank of the same layout. Raises KeyError or RuntimeError when it does not fit."""
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


def everything(sequences: Sequences) -> IntArray:
    """The indices of all sequences with trained tokens."""
    return np.flatnonzero(sequences.trained > 0)
