"""The losses of an iteration's micro-batches, and the sums of their metrics over micro-batches and data ranks.

Invariant: losses and metrics are sums over the trained tokens of the global batch, with coefficients computed over the whole optimizer step,
so neither the layout nor the split into micro-batches changes them.
"""

import json

import numpy as np
import torch
from torch import Tensor

from polyreme.experience.trained_samples import TrainedSamples
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch, sequence_of
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.mixing import ptx_loss
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.iteration import Iteration, episodes_of, fresh_sequences
from polyreme_trainer.megatron.training.roles import Forward, Loss, LossTerm, everything


class Losses:
    """The losses of an iteration's micro-batches, and the sums of their metrics."""

    def __init__(
        self, batch: Iteration, algorithm: Algorithm, tokens: TokenBatch, advantages: Advantages, shard: DataShard
    ) -> None:
        self.sequences, self._algorithm, self._tokens, self._advantages = batch.sequences, algorithm, tokens, advantages
        self._shard = shard
        self.with_entropy = algorithm.needs.entropy
        self._sequence_of = sequence_of(batch.sequences.offsets)
        self._episode_of = episodes_of(batch.sequences, tokens)
        self._fresh = np.isin(self._sequence_of, fresh_sequences(batch))
        self._metrics: list[Metrics] = []
        """Of every micro-batch. The names of the policy's, the critic's and the supervised rows' metrics differ."""
        self._policy_steps = 0
        self._steps = batch.steps
        self._weights = np.zeros(len(tokens.mask))

    def of_policy(self, step: IntArray) -> Loss:
        """The policy's loss in an optimizer step on the sequences `step`."""
        weight = self._coefficients(step)
        self._policy_steps += 1
        self._weights += weight
        return self._of_policy(weight)

    def of_probe(self, indices: IntArray) -> Loss:
        """The policy's loss on sequences that no optimizer step takes from it: only their metrics count."""
        return self._of_policy(self._coefficients(indices))

    def _coefficients(self, sequences: IntArray) -> FloatArray:
        """The coefficients of an optimizer step on sequences, which takes whole episodes."""
        return self._algorithm.coefficients(self._tokens, self._advantages, np.unique(self._episode_of[sequences]))

    def _of_policy(self, weight: FloatArray) -> Loss:
        def loss(batch: MicroBatch, output: Tensor) -> Tensor:
            logprobs, entropy = output if self.with_entropy else (output, None)
            value, metrics = self._algorithm.loss(self.inputs(batch, logprobs, weight, entropy))
            self._metrics.append(
                {**metrics, "padding_fraction": (torch.tensor(batch.padding), torch.tensor(batch.targets.numel()))}
            )
            return value

        return loss

    def of_critic(self, step: IntArray) -> Loss:
        """The critic's loss in an optimizer step on the sequences `step`."""
        weight = self._algorithm.critic_coefficients(self._tokens, np.unique(self._episode_of[step]))

        def loss(batch: MicroBatch, values: Tensor) -> Tensor:
            value, metrics = self._algorithm.critic_loss(self.critic_inputs(batch, values, weight))
            self._metrics.append(metrics)
            return value

        return loss

    def of_rows(self, rows: Sequences, coef: float, forward: Forward) -> LossTerm:
        """The supervised part of an optimizer step, on the log-probabilities that `forward` computes."""
        tokens = int(rows.trained.sum())

        def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            value, metrics = ptx_loss(logprobs, tokens, coef)
            self._metrics.append(metrics)
            return value

        return LossTerm(rows, everything(rows), loss, forward)

    def inputs(self, batch: MicroBatch, logprobs: Tensor, weight: FloatArray, entropy: Tensor | None = None) -> LossInputs:
        """The inputs of the policy's loss for a micro-batch."""
        tokens = self._tokens
        return LossInputs(
            logprobs=logprobs,
            old=logprobs.detach() if tokens.old is None else batch.take(tokens.old),
            behaviour=batch.take(tokens.behaviour),
            advantages=batch.take(self._advantages.advantages),
            weight=batch.take(weight),
            sequence=batch.sequence,
            sequences=len(batch.indices),
            reference=None if tokens.reference is None else batch.take(tokens.reference),
            entropy=entropy,
            fresh=batch.take(self._fresh),
        )

    def critic_inputs(self, batch: MicroBatch, values: Tensor, weight: FloatArray) -> LossInputs:
        """The inputs of the critic's loss for a micro-batch."""
        tokens, returns = self._tokens, self._advantages.returns
        assert returns is not None and tokens.values is not None
        behaviour = batch.take(tokens.behaviour)
        return LossInputs(
            logprobs=behaviour,
            old=behaviour,
            behaviour=behaviour,
            advantages=batch.take(self._advantages.advantages),
            weight=batch.take(weight),
            sequence=batch.sequence,
            sequences=len(batch.indices),
            returns=batch.take(returns),
            values=batch.take(tokens.values),
            new_values=values,
        )

    def trained_samples(self) -> TrainedSamples:
        """How the optimizer steps used each sample. Its advantages are those of the tokens that the policy sampled, trained on or not."""
        count = len(self.sequences)
        steps: list[list[int]] = [[] for _ in range(count)]
        for number, step in enumerate(self._steps, start=1):
            for sequence in step.tolist():
                steps[sequence].append(number)
        sums = np.bincount(self._sequence_of, weights=self._weights, minlength=count)
        return TrainedSamples(
            advantages=self._advantages.advantages[self._tokens.version >= 0],
            weights=(sums / max(1, len(steps[0]))).astype(np.float32),
            steps=np.array(steps, dtype=np.int32),
        )

    def reduced(self) -> dict[str, float]:
        """Every metric over all micro-batches and data ranks. Collective."""
        found = over_ranks(self._shard, self._metrics)
        if "policy_loss" in found:  # the sum over a step's tokens is the step's loss, even if its coefficients do not add up to 1
            found["policy_loss"] = (found["policy_loss"][0], self._policy_steps)
        return finish(found)


def over_ranks(shard: DataShard, parts: list[Metrics]) -> dict[str, tuple[float, float]]:
    """Combines the metrics of all data ranks' micro-batches, which are on the last stage. Collective.

    Ranks may have different numbers of micro-batches, or none, so they exchange names together with numbers.
    """
    found = combine(parts)
    for group in shard.groups:
        found = combine(json.loads(other) for other in shard.gather(json.dumps(found).encode(), group))
    return found
