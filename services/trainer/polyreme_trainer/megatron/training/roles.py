"""Roles: actor, critic, reference and moving average are the same kind of object, a model with an optimizer if it is trained.

With adapters, a reference that is the actor's initial model needs no separate model, see `BaseRole`.

Invariant: a role without an optimizer changes only between iterations, if at all. Checkpoints and resumes handle all roles alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.algorithms.metrics import Metrics
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, MicroBatch, Sequences, cost_of
from polyreme_trainer.megatron.models.model import ShardedModel
from polyreme_trainer.megatron.models.pipeline import Job, run
from polyreme_trainer.megatron.parallel.reshard import WEIGHTS, RankState
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer

Model = TypeVar("Model", bound=ShardedModel, covariant=True)
T = TypeVar("T")

Forward = Callable[[MicroBatch], Tensor]
"""A model's output for a micro-batch: a number per trained token, fp32 [k], in the order of `MicroBatch.tokens`, or n, [n, k]."""

Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, T]]
"""Maps a micro-batch and the model's output for it to its addend of the loss, a scalar to differentiate, and a result: its
metrics. The step's loss is the sum over all micro-batches and data ranks."""


@dataclass(frozen=True)
class LossTerm(Generic[T]):
    """A loss and what it is computed on.

    Attributes:
        sequences, indices: the sequences, and which of them.
        forward: computes the model's output for the loss; None for the role's own.
        runs: the number of sequences of each run that has adapters of its own, see `DataShard.micro_batches`.
        prepare: called before every forward pass of a micro-batch through a part of the model; None: nothing is to be done.
    """

    sequences: Sequences
    indices: IntArray
    loss: Loss[T]
    forward: Forward | None = None
    runs: Sequence[int] = ()
    prepare: Callable[[MicroBatch], None] | None = None

    @property
    def predictions(self) -> int:
        """The number of tokens that the model computes, over all data ranks."""
        return int((self.sequences.lengths[self.indices] - 1).sum())


class Role(Generic[Model]):
    """A model, its optimizer if it is trained, and its output for a micro-batch.

    An optimizer step is one or more calls of `forward_backward`, whose gradients add up, and then one of `optim_step`.

    Args:
        name: the role's name, also in checkpoints.
        model: this rank's shard of the model.
        output: computes the model's number for each trained token.
        shard: this rank's share of batches.

    Attributes:
        replays: whether tokens go to the experts of `Sequences.routes`, where these are known.
        has_gradient: whether there is a gradient for the next optimizer step.
    """

    def __init__(self, name: str, model: Model, output: Forward, shard: DataShard) -> None:
        self.name, self.model, self.output, self.shard = name, model, output, shard
        self.cost = cost_of(model.arch)
        self.optimizer: Optimizer | None = None
        self.replays = False
        self.has_gradient = False

    def make_optimizer(self, adam: Adam) -> None:
        """Creates an optimizer with zero moments. If the weights are bfloat16, it copies them in full precision now."""
        self.model.use()
        self.optimizer = None  # frees its memory before the new one is allocated
        self.optimizer = Optimizer(self.model, adam)

    @torch.no_grad()
    def forward(self, sequences: Sequences, indices: IntArray, forward: Forward | None = None) -> FloatArray:
        """The model's numbers for the trained tokens of `indices`, float32 [t], and 0 elsewhere. The same on every data rank.

        Args:
            forward: computes them; None for the role's own.
        """
        self.model.use()
        result = torch.zeros(int(sequences.offsets[-1]), dtype=torch.float32, device=self.shard.device)
        jobs = self._jobs(LossTerm(sequences, indices, keep_output, forward))
        for tokens, output in run(self.model, jobs, backward=False):
            result[torch.from_numpy(tokens).to(result.device)] = output
        return self.shard.sum(result).cpu().numpy()

    @torch.no_grad()
    def measure(self, term: LossTerm[T]) -> list[T]:
        """The loss's results for this rank's micro-batches, without a gradient."""
        self.model.use()
        return run(self.model, self._jobs(term), backward=False)

    def forward_backward(self, *terms: LossTerm[T]) -> list[T]:
        """Adds the gradient of the sum of the terms to that of the next optimizer step, see `over_ranks` for the metrics.

        Experts are balanced over the tokens of all terms of a call.

        Returns:
            The losses' results for this rank's micro-batches.
        """
        assert self.optimizer is not None, f"role {self.name} is frozen"
        if not self.has_gradient:
            self.clear_gradient()
        self.model.use()
        with self._balanced(terms):
            return run(self.model, self._jobs(*terms), backward=True)

    def clear_gradient(self) -> None:
        """Starts the next optimizer step with a gradient of zero, so that it can also be taken without `forward_backward`."""
        assert self.optimizer is not None, f"role {self.name} is frozen"
        self.optimizer.zero_grad()
        self.has_gradient = True

    def gather_gradient(self) -> None:
        """Sums the gradients over the ranks before the step, see `Optimizer.gather_gradient`. Collective over all ranks."""
        assert self.optimizer is not None, f"role {self.name} is frozen"
        self.optimizer.gather_gradient()

    def gradient(self) -> dict[str, tuple[int, Tensor]] | None:
        """This rank's part of the gradient since the last optimizer step, as a kind of `RankState` (not copies); None without
        any. With several ranks, after `gather_gradient`."""
        if self.optimizer is None or not self.has_gradient:
            return None
        return {fragment.name: (fragment.start, fragment.gradient) for fragment in self.optimizer.fragments}

    @torch.no_grad()
    def set_gradient(self, gradient: Mapping[str, Tensor] | None) -> None:
        """Sets the gradient since the last step, of which this rank keeps its part. `gradient`: of its whole parameters."""
        self.has_gradient = False
        if gradient is not None:
            self.clear_gradient()
            for name, param in self.model.module.named_parameters():
                if param.requires_grad:
                    param.main_grad.copy_(gradient[name])
            assert self.optimizer is not None
            self.optimizer.keep_own()

    def optim_step(self, lr: float) -> float:
        """Changes the weights by the gradient, which the following `forward_backward` starts anew. Collective over all ranks.

        Returns:
            The global gradient norm before clipping.
        """
        assert self.optimizer is not None and self.has_gradient, f"role {self.name} has no gradient"
        self.has_gradient = False
        self.model.use()
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

    def _balanced(self, terms: Sequence[LossTerm[T]]) -> AbstractContextManager[None]:
        """The context of the terms' backward passes."""
        if self.model.routing is None:
            return nullcontext()
        return self.model.routing.step(
            sum(term.predictions for term in terms), partial(self._count_choices, terms), self.shard.sum
        )

    def _count_choices(self, terms: Sequence[LossTerm[T]]) -> None:
        """Runs the terms' forward passes only, for the routers' counts."""
        hidden = (LossTerm(term.sequences, term.indices, no_loss, self._hidden) for term in terms)
        run(self.model, self._jobs(*hidden), backward=False)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        return self.model.hidden(batch.ids)

    def _jobs(self, *terms: LossTerm[T]) -> Iterator[Job[T]]:
        """This data rank's micro-batches of the terms. One without sequences only takes part in collectives and has no result."""
        for term in terms:
            forward = term.forward or self.output
            for batch in self.shard.micro_batches(
                term.sequences,
                term.indices,
                self.cost,
                self.model.alignment,
                self.model.rank.micro_batch_group,
                self.model.joins_beginnings,
                term.runs,
            ):
                loss = partial(term.loss, batch) if len(batch.indices) else empty_loss
                yield Job(batch.ids, partial(forward, batch), loss, partial(self._around, batch, term.prepare))

    def _around(self, batch: MicroBatch, prepare: Callable[[MicroBatch], None] | None) -> AbstractContextManager[None]:
        """The context of a micro-batch's forward pass."""
        if prepare is not None:
            prepare(batch)
        return nullcontext() if self.model.routing is None else self.model.routing.micro_batch(batch, self.replays)

    def tensors(self) -> Iterator[Tensor]:
        """The role's tensors that this rank keeps for longer than a step: weights, buffers, moments."""
        yield from self.model.tensors()
        if self.optimizer is not None:
            yield from self.optimizer.tensors()

    def rank_state(self) -> RankState:
        """The weights and moments that training changes and that this rank saves (not copies). If several ranks have the same
        weights, the first one saves them."""
        weights = {name: (0, param.flatten()) for name, param in self.model.own_state_dict().items()}
        state: dict[str, object] = {"steps": 0, WEIGHTS: weights}
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


AnyRole = Role[ShardedModel]
"""A role with a model of any kind."""


class BaseRole(Role[Model]):
    """A frozen role: another role's model without its adapters, in the same memory."""

    @contextmanager
    def _around(self, batch: MicroBatch, prepare: Callable[[MicroBatch], None] | None) -> Iterator[None]:
        assert self.model.adapters is not None
        with self.model.adapters.off(), super()._around(batch, prepare):
            yield


def empty_loss(output: Tensor) -> tuple[Tensor, None]:
    """The loss of no sequence, which has a gradient of zero; no result."""
    return 0 * output.sum(), None


def keep_output(batch: MicroBatch, output: Tensor) -> tuple[Tensor, tuple[IntArray, Tensor]]:
    """No loss; the result is the model's output and the tokens that it belongs to."""
    return output.new_zeros(()), (batch.tokens, output)


def no_loss(batch: MicroBatch, output: Tensor) -> tuple[Tensor, None]:
    """Neither a loss nor a result."""
    return output.new_zeros(()), None


def every(sequences: Sequences) -> IntArray:
    """The indices of all sequences."""
    return np.arange(len(sequences))


def everything(sequences: Sequences) -> IntArray:
    """The indices of all sequences with trained tokens."""
    return np.flatnonzero(sequences.trained > 0)
