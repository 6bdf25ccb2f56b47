"""The losses of micro-batches, and the sums of their metrics over micro-batches and data ranks.

A loss is an object that gets a micro-batch and the model's output for it, and returns its addend of the step's loss and metrics.

Invariant: losses and metrics are sums over the trained tokens of the global batch, with coefficients computed over the whole
optimizer step, so neither the layout nor the split into micro-batches changes them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch, sequence_of
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics, combine
from polyreme_trainer.algorithms.objective import StageInputs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import RowsLoss
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.iteration import Iteration, episodes_of, fresh_sequences


@dataclass(frozen=True)
class IterationLosses:
    """What the losses of an iteration's optimizer steps have in common.

    Attributes:
        tokens: the samples, with everything that was computed before the first step.
    """

    iteration: Iteration
    algorithm: Algorithm
    tokens: TokenBatch
    advantages: Advantages

    def policy(self, step: IntArray) -> "PolicyLoss":
        """The policy's loss in an optimizer step on the sequences `step`, which are whole episodes."""
        return PolicyLoss(self, self.algorithm.coefficients(self.tokens, self.advantages, self._episodes(step)))

    def critic(self, step: IntArray) -> "CriticLoss":
        """The critic's loss in an optimizer step on the sequences `step`."""
        return CriticLoss(self, self.algorithm.critic_coefficients(self.tokens, self._episodes(step)))

    def _episodes(self, step: IntArray) -> IntArray:
        return np.unique(self._episode_of[step])

    @cached_property
    def _episode_of(self) -> IntArray:
        return episodes_of(self.iteration.sequences, self.tokens)

    @cached_property
    def fresh(self) -> np.ndarray:
        """bool [t], the tokens of sequences that the policy before the step sampled completely."""
        return np.isin(sequence_of(self.iteration.sequences.offsets), fresh_sequences(self.iteration))


@dataclass(frozen=True)
class PolicyLoss:
    """The policy's loss in one optimizer step.

    Attributes:
        weight: float32 [t], each token's coefficient in the step's loss.
    """

    of: IterationLosses
    weight: FloatArray

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Metrics]:
        """`output`: log-probabilities [k], or with the entropies [2, k]."""
        logprobs, entropy = output if output.dim() == 2 else (output, None)
        loss, metrics = self.of.algorithm.loss(self.inputs(batch, logprobs, entropy))
        return loss, {**metrics, "padding_fraction": (torch.tensor(batch.padding), torch.tensor(batch.targets.numel()))}

    def inputs(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossInputs:
        """The algorithm's inputs for a micro-batch."""
        tokens = self.of.tokens
        return LossInputs(
            logprobs=logprobs,
            old=logprobs.detach() if tokens.old is None else batch.take(tokens.old),
            behaviour=batch.take(tokens.behaviour),
            advantages=batch.take(self.of.advantages.advantages),
            weight=batch.take(self.weight),
            sequence=batch.sequence,
            sequences=len(batch.indices),
            reference=None if tokens.reference is None else batch.take(tokens.reference),
            entropy=entropy,
            fresh=batch.take(self.of.fresh),
        )


@dataclass(frozen=True)
class CriticLoss:
    """The critic's loss in one optimizer step. `weight` as in `PolicyLoss`."""

    of: IterationLosses
    weight: FloatArray

    def __call__(self, batch: MicroBatch, values: Tensor) -> tuple[Tensor, Metrics]:
        tokens, returns = self.of.tokens, self.of.advantages.returns
        assert returns is not None and tokens.values is not None
        return self.of.algorithm.critic_loss(values, *map(batch.take, (tokens.values, returns, self.weight)))


@dataclass(frozen=True)
class ObjectiveLoss:
    """The loss of an objective on rows, in one optimizer step or evaluation on all of them.

    Attributes:
        sequences: the rows' sequences.
    """

    given: RowsLoss
    rows: StageRows
    sequences: Sequences

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Metrics]:
        numbers, reference = batch.indices[:: self.rows.width] // self.rows.width, self.given.reference
        columns = self.rows.columns.items()
        inputs = StageInputs(
            output=output,
            sequence=batch.sequence,
            sequences=len(batch.indices),
            columns={name: torch.from_numpy(values[numbers]).to(output.device) for name, values in columns},
            rows=len(self.rows),
            tokens=int(self.sequences.trained.sum()),
            reference=None if reference is None else batch.take(reference),
            baseline=self.given.baseline,
        )
        return self.given.objective.loss(inputs)


def over_ranks(shard: DataShard, parts: Iterable[Metrics]) -> dict[str, tuple[float, float]]:
    """Combines the metrics of all data ranks' micro-batches, which are on the last stage. Collective.

    Ranks may have different numbers of micro-batches, or none, so they exchange names together with numbers.
    """
    found = combine(parts)
    for group in shard.groups:
        found = combine(json.loads(other) for other in shard.gather(json.dumps(found).encode(), group))
    return found
