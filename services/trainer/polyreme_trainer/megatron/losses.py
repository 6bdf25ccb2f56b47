"""The algorithm's losses on the micro-batches of an iteration.

Invariant: a loss gets its coefficients from the whole optimizer step, and its metrics are summed over all micro-batches and data ranks, so
neither depends on how the step was cut.
"""

import json

import numpy as np
from torch import Tensor

from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.mixing import ptx_loss
from polyreme_trainer.megatron.batch import FloatArray, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.roles import Loss, LossTerm, everything
from polyreme_trainer.megatron.shard import DataShard


class Losses:
    """The losses of an iteration's micro-batches, and the sums of their metrics.

    Args:
        tokens, advantages: the whole iteration's.
        fresh: the indices of the sequences that the policy before the step sampled completely.
    """

    def __init__(
        self, algorithm: Algorithm, tokens: TokenBatch, advantages: Advantages, fresh: IntArray, shard: DataShard
    ) -> None:
        self._algorithm, self._tokens, self._advantages, self._shard = algorithm, tokens, advantages, shard
        self.with_entropy = algorithm.needs.entropy
        self._fresh = np.isin(tokens.sequence_of, fresh)
        self._policy: list[Metrics] = []
        self._critic: list[Metrics] = []
        self._supervised: list[Metrics] = []
        self._coefficients = 0.0

    def of_policy(self, step: IntArray) -> Loss:
        """The policy's loss in an optimizer step on the sequences `step`."""
        weight = self._algorithm.coefficients(self._tokens, self._advantages, step)
        self._coefficients += float(weight.sum())

        def loss(batch: MicroBatch, output: Tensor) -> Tensor:
            logprobs, entropy = output if self.with_entropy else (output, None)
            value, metrics = self._algorithm.loss(self.inputs(batch, logprobs, weight, entropy))
            self._policy.append(metrics)
            return value

        return loss

    def of_critic(self, step: IntArray) -> Loss:
        """The critic's loss in an optimizer step on the sequences `step`."""
        weight = self._algorithm.critic_coefficients(self._tokens, step)

        def loss(batch: MicroBatch, values: Tensor) -> Tensor:
            value, metrics = self._algorithm.critic_loss(self.critic_inputs(batch, values, weight))
            self._critic.append(metrics)
            return value

        return loss

    def of_rows(self, rows: Sequences, coef: float) -> LossTerm:
        """The supervised part of an optimizer step."""
        tokens = int(rows.trained.sum())

        def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            value, metrics = ptx_loss(logprobs, tokens, coef)
            self._supervised.append(metrics)
            return value

        return LossTerm(rows, everything(rows), loss)

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

    def reduced(self) -> dict[str, float]:
        """Every metric over all micro-batches and data ranks. Collective."""
        policy, critic, rows = (over_ranks(self._shard, parts) for parts in (self._policy, self._critic, self._supervised))
        if "policy_loss" in policy:  # skipped sequences have loss 0, but their coefficients count
            policy["policy_loss"] = (policy["policy_loss"][0], self._coefficients)
        return finish(policy) | finish(critic) | finish(rows)


def over_ranks(shard: DataShard, parts: list[Metrics]) -> dict[str, tuple[float, float]]:
    """Combines the metrics of all data ranks' micro-batches. Collective.

    Ranks may have different numbers of micro-batches, or none, so they exchange names together with numbers.
    """
    mine = combine(parts)
    return mine if shard.ranks == 1 else combine(json.loads(other) for other in shard.gather(json.dumps(mine).encode()))
