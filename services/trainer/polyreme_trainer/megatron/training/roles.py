"""Roles: actor, critic, reference and moving average are the same kind of object, a model with an optimizer if it is trained.

With adapters, a reference that is the actor's initial model needs no separate model, see `BaseRole`.

Invariant: a role without an optimizer changes only between two iterations, if at all. Checkpoints and resumes iterate over roles and handle
all of them alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.algorithms.metrics import Metrics
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, MicroBatch, Sequences, cost_of
from polyreme_trainer.megatron.models.model import ShardedModel
from polyreme_trainer.megatron.models.pipeline import Job, run_stages, run_whole
from polyreme_trainer.megatron.parallel.reshard import WEIGHTS, RankState
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer

Model = TypeVar("Model", bound=ShardedModel)

Forward = Callable[[MicroBatch], Tensor]
"""A model's output for a micro-batch: one number per trained token, fp32 [k], in the order of `MicroBatch.tokens`, or n numbers, [n, k]."""

Loss = Callable[[MicroBatch, Tensor], Tensor]
"""Maps a micro-batch and the model's output for it to the scalar to differentiate."""


@dataclass(frozen=True)
class LossTerm:
    """A term of an optimizer step's loss: the sequences `indices` and the loss on them, see `Role.update`."""

    sequences: Sequences
    indices: IntArray
    loss: Loss
    forward: Forward | None = None


class Role(Generic[Model]):
    """A model, its optimizer if it is trained, and its output for a micro-batch.

    Args:
        name: the role's name, also in checkpoints.
        model: this rank's shard of the model.
        forward: computes the model's number for each trained token.
        shard: this rank's share of batches.

    Attributes:
        replays: whether tokens go to the experts of `Sequences.routes`, where these are known.
    """

    def __init__(self, name: str, model: Model, forward: Forward, shard: DataShard) -> None:
        self.name, self.model, self.forward, self.shard = name, model, forward, shard
        self.cost = cost_of(model.arch)
        self.optimizer: Optimizer | None = None
        self.replays = False

    def make_optimizer(self, adam: Adam) -> None:
        """Creates an optimizer with zero moments. If the weights are bfloat16, it copies them in full precision now."""
        self.model.use()
        self.optimizer = None  # frees its memory before the new one is allocated
        self.optimizer = Optimizer(self.model, adam)

    @torch.no_grad()
    def infer(self, sequences: Sequences, indices: IntArray) -> FloatArray:
        """The model's numbers for the trained tokens of `indices`, float32 [t], and 0 elsewhere. The same on every data rank."""
        self.model.use()
        result = torch.zeros(int(sequences.offsets[-1]), dtype=torch.float32, device=self.shard.device)

        def keep(batch: MicroBatch, output: Tensor) -> Tensor:
            result[torch.from_numpy(batch.tokens).to(result.device)] = output
            return result.new_zeros(())

        self._run(LossTerm(sequences, indices, keep), backward=False)
        return self.shard.sum(result).cpu().numpy()

    @torch.no_grad()
    def measure(self, term: LossTerm) -> None:
        """Computes a loss and its metrics without a gradient."""
        self.model.use()
        self._run(term, backward=False)

    def update(
        self,
        sequences: Sequences,
        indices: IntArray,
        loss: Loss,
        lr: float,
        forward: Forward | None = None,
        further: Sequence[LossTerm] = (),
    ) -> float:
        """Runs one optimizer step on `indices`, divided among the data ranks.

        Args:
            loss: its sum over all micro-batches and ranks is the step's loss.
            forward: computes the model's output for the loss; None for the role's own.
            further: more terms of the step's loss.

        Returns:
            The global gradient norm before clipping.
        """
        assert self.optimizer is not None, f"role {self.name} is frozen"
        self.model.use()
        self.optimizer.zero_grad()
        terms = (LossTerm(sequences, indices, loss, forward), *further)
        with self._routing(terms):
            for part in terms:
                self._run(part, backward=True)
        self.optimizer.set_lr(lr)
        norm = self.optimizer.step()
        if self.model.routing is not None:
            self.model.routing.update_biases()
        return norm

    @property
    def balances(self) -> bool:
        """Whether optimizer steps balance the model's experts over all tokens of the step, see `Routing.balances`."""
        return self.model.routing is not None and self.model.routing.balances

    @property
    def routing_metrics(self) -> Metrics:
        """The routers' metrics of the last optimizer step, the same on every rank; empty for a dense model."""
        return {} if self.model.routing is None else self.model.routing.metrics()

    def _routing(self, terms: Sequence[LossTerm]) -> AbstractContextManager[None]:
        """The context of the backward passes of an optimizer step."""
        if self.model.routing is None:
            return nullcontext()

        def count() -> None:
            for term in terms:
                self._run(replace(term, loss=lambda batch, hidden: hidden.new_zeros(()), forward=self._hidden), backward=False)

        tokens = sum(int((term.sequences.lengths[term.indices] - 1).sum()) for term in terms)
        return self.model.routing.step(tokens, count, self.shard.sum)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        return self.model.hidden(batch.ids)

    def _run(self, term: LossTerm, backward: bool) -> None:
        """Runs this data rank's micro-batches of a term."""
        forward, routing = term.forward or self.forward, self.model.routing

        def job(batch: MicroBatch) -> Job:
            context = nullcontext if routing is None else partial(routing.micro_batch, batch, self.replays)
            if not len(batch.indices):  # the rank only takes part in the collectives
                return Job(batch.ids, lambda: 0 * forward(batch).sum(), context)
            return Job(batch.ids, lambda: term.loss(batch, forward(batch)), context)

        model, sequences = self.model, term.sequences
        group, joins = model.rank.micro_batch_group, model.joins_beginnings
        jobs = map(job, self.shard.micro_batches(sequences, term.indices, self.cost, model.alignment, group, joins))
        if self.shard.stages is None:
            run_whole(jobs, backward)
        else:
            run_stages(model, jobs, backward)

    def tensors(self) -> Iterator[Tensor]:
        """The role's tensors that this rank keeps for longer than a step: weights, buffers, moments."""
        yield from self.model.tensors()
        if self.optimizer is not None:
            yield from self.optimizer.tensors()

    def rank_state(self) -> RankState:
        """The weights and moments that training changes and that this rank saves (not copies). If several ranks have the same weights, the
        first one saves them."""
        weights = {name: (0, param.flatten()) for name, param in self.model.own_state_dict().items()}
        state: dict[str, Any] = {"steps": 0, WEIGHTS: weights}
        if self.optimizer is not None:
            state |= {"steps": self.optimizer.steps, **self.optimizer.rank_state()}
        return state

    def restore(self, steps: int, read: Callable[[str, Iterable[str]], dict[str, Tensor]]) -> None:
        """Sets weights and moments to saved ones.

        Args:
            steps: the optimizer's steps.
            read: kind of state, names of parameters -> this rank's whole parameters, see `reshard`.
        """
        self.model.use()
        self.model.load_state_dict(read(WEIGHTS, self.model.state_dict()))
        if self.optimizer is not None:
            self.optimizer.restore(steps, read)


class BaseRole(Role[Model]):
    """A frozen role: another role's model without its adapters, in the same memory."""

    def _run(self, term: LossTerm, backward: bool) -> None:
        assert self.model.adapters is not None and not backward
        with self.model.adapters.off():
            super()._run(term, backward)


def everything(sequences: Sequences) -> IntArray:
    """The indices of all sequences with trained tokens."""
    return np.flatnonzero(sequences.trained > 0)
