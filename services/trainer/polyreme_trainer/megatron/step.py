"""One iteration of training: advantages of the whole batch, then optimizer steps over micro-batches and data ranks.

Invariant: losses and metrics are sums over the trained tokens of the global batch, with coefficients computed over the whole optimizer step,
so neither the layout nor the split into micro-batches changes them. The algorithm decides which samples have a gradient.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyreme.experience.trained_samples import TrainedSamples
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.mixing import ptx_loss
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batch import FloatArray, IntArray, MicroBatch, Sequences, with_end
from polyreme_trainer.megatron.roles import Forward, Loss, LossTerm, Role, everything
from polyreme_trainer.megatron.shard import DataShard

PROBE = 16
"""The number of sequences that measure the mismatch when no sequence has a gradient."""

_SERIES = {"score": "score", "reward": "rewards", "advantage": "advantages", "return": "returns", "value": "values"}
RECORDED_AS = {
    "policy_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "ppo_kl": "actor/ppo_kl",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "teacher_kl": "actor/teacher_kl",
    "value_loss": "critic/vf_loss",
    "value_clip_fraction": "critic/vf_clipfrac",
    "explained_variance": "critic/explained_variance",
    "importance_weight": "importance/weight_mean",
    "importance_weight_max": "importance/weight_max",
    "truncated_fraction": "importance/truncated_fraction",
    **{name: f"critic/{series}/mean" for name, series in _SERIES.items()},
    **{f"{name}_max": f"critic/{series}/max" for name, series in _SERIES.items()},
    **{f"{name}_min": f"critic/{series}/min" for name, series in _SERIES.items()},
}
"""Names in the run's metrics that differ from the algorithm's. The names of actor and critic are those of MindSpeed RL."""


@dataclass(frozen=True)
class Iteration:
    """The data and settings of one iteration.

    Attributes:
        number: the iteration's number; the policy that it trains has version `number - 1`.
        sequences, tokens: the samples, as the models' sequences and as the algorithm's batch.
        steps: the sequences of each optimizer step.
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
        samples: what the iteration did with its samples.
        seconds: wall-clock seconds of each of PARTS on this rank.
    """

    metrics: dict[str, float | None]
    state: AlgorithmState
    samples: TrainedSamples
    seconds: dict[str, float]


PARTS = ("old_log_p", "reference_model", "critic_model", "adv", "update", "update_critic")
"""The timed parts of an iteration, with MindSpeed RL's names."""


class Stopwatch:
    """Sums the seconds of each of PARTS. A part that did not run has 0."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the block's duration to `name`."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began


class Models(Protocol):
    """The roles of a run, on this rank."""

    @property
    def actor(self) -> Role[Any]: ...
    @property
    def reference(self) -> Role[Any] | None: ...
    @property
    def critic(self) -> Role[Any] | None: ...
    @property
    def shard(self) -> DataShard: ...

    def logprobs_and_entropies(self, batch: MicroBatch) -> Tensor:
        """The actor's log-probabilities and entropies of the trained tokens, fp32 [2, k]."""
        ...


def train_iteration(batch: Iteration, algorithm: Algorithm, models: Models) -> Trained:
    """Runs every optimizer step of one iteration.

    With a single step, the old log-probabilities are those of the step's own forward pass; with several steps they are computed first.
    Sequences without a gradient are skipped. When no sequence has a gradient, a few are run to measure the mismatch. The optimizer steps in
    any case, so that its moments decay.
    """
    clock = Stopwatch()
    sequences, tokens = batch.sequences, before_advantages(batch, algorithm, models, clock)
    with clock.part("adv"):
        advantages = algorithm.advantages(tokens, batch.state)
    moving = algorithm.has_gradient(tokens, advantages) if batch.trains_actor else np.zeros(len(sequences), dtype=np.bool_)
    parts = [step[moving[step]] for step in batch.steps]
    needed = np.unique(np.concatenate(parts))
    probed = needed if len(needed) else fresh_sequences(batch)[:PROBE]
    if len(parts) > 1 and tokens.old is None:
        with clock.part("old_log_p"):
            tokens = replace(tokens, old=models.actor.infer(sequences, probed))
    if models.reference is not None and tokens.reference is None:
        with clock.part("reference_model"):
            tokens = replace(tokens, reference=models.reference.infer(sequences, probed))
    losses = Losses(batch, algorithm, tokens, advantages, models.shard)
    forward = models.logprobs_and_entropies if losses.with_entropy else models.actor.forward
    if not len(needed):
        probe(models.actor, forward, losses, probed)
    norms, critic_norms = [], []
    for number, (step, part) in enumerate(zip(batch.steps, parts, strict=True)):
        if batch.trains_actor:
            mixed = [losses.of_rows(rows, batch.ptx_coef) for rows in batch.mixed[number : number + 1]]
            with clock.part("update"):
                norms.append(models.actor.update(sequences, part, losses.of_policy(step), batch.lr, forward, mixed))
        if models.critic is not None:
            trained = step[sequences.trained[step] > 0]
            with clock.part("update_critic"):
                critic_norms.append(models.critic.update(sequences, trained, losses.of_critic(step), batch.critic_lr))
    measured: dict[str, float | None] = {"mismatch_kl": None, **finish(advantages.metrics), **losses.reduced()}
    measured |= {"grad_norm": float(np.mean(norms)) if norms else 0.0, "actor/lr": batch.lr if batch.trains_actor else 0.0}
    if models.critic is not None:
        measured |= {"critic/grad_norm": float(np.mean(critic_norms)), "critic/lr": batch.critic_lr}
    measured["trained_samples"] = int((moving & has_advantage(tokens, advantages)).sum())
    named = {RECORDED_AS.get(name, name): value for name, value in measured.items()}
    return Trained(named, advantages.state, losses.trained_samples(), clock.seconds)


def before_advantages(batch: Iteration, algorithm: Algorithm, models: Models, clock: Stopwatch) -> TokenBatch:
    """The batch with the inputs that the algorithm's advantages need: values, reference and old log-probabilities."""
    sequences, tokens, needs = batch.sequences, batch.tokens, algorithm.needs
    every = np.flatnonzero(sequences.trained > 0)
    if needs.critic:
        assert models.critic is not None
        with clock.part("critic_model"):
            tokens = replace(tokens, values=models.critic.infer(sequences, every))
    if needs.final_values:
        assert models.critic is not None
        with clock.part("critic_model"):
            tokens = replace(tokens, final_values=values_after_end(models.critic, sequences, every[tokens.truncated[every]]))
    if needs.old:
        assert models.reference is not None
        with clock.part("old_log_p"):
            tokens = replace(tokens, old=models.actor.infer(sequences, every))
        with clock.part("reference_model"):
            tokens = replace(tokens, reference=models.reference.infer(sequences, every))
    return tokens


def values_after_end(critic: Role[Any], sequences: Sequences, indices: IntArray) -> FloatArray:
    """float32 [n], the critic's value after the last token of the sequences `indices`; 0 for all others."""
    extended = with_end(sequences)
    values = np.zeros(len(sequences), dtype=np.float32)
    values[indices] = critic.infer(extended, indices)[extended.offsets[indices + 1] - 1]
    return values


def has_advantage(tokens: TokenBatch, advantages: Advantages) -> np.ndarray:
    """bool [n], whether a sequence has a token with an advantage other than 0."""
    return np.bincount(tokens.sequence_of, weights=advantages.advantages != 0, minlength=len(tokens)) > 0


def fresh_sequences(batch: Iteration) -> IntArray:
    """The indices of sequences that the policy before the step sampled completely.

    An answer that continued over a swap is not among them, not even its last tokens: these were sampled with keys and values of the older
    weights in the cache, so their probabilities differ by more than the engines do.
    """
    tokens = batch.tokens
    other = (tokens.version >= 0) & (tokens.version != batch.number - 1)
    stale = np.bincount(tokens.sequence_of, weights=other, minlength=len(tokens))
    return np.flatnonzero((stale == 0) & (batch.sequences.trained > 0))


def probe(actor: Role[Any], forward: Forward, losses: "Losses", indices: IntArray) -> None:
    """Runs the policy's loss on `indices` without a gradient, so that their metrics measure the mismatch."""
    actor.measure(LossTerm(losses.sequences, indices, losses.of_policy(indices), forward))


class Losses:
    """The losses of an iteration's micro-batches, and the sums of their metrics."""

    def __init__(
        self, batch: Iteration, algorithm: Algorithm, tokens: TokenBatch, advantages: Advantages, shard: DataShard
    ) -> None:
        self.sequences, self._algorithm, self._tokens, self._advantages = batch.sequences, algorithm, tokens, advantages
        self._shard = shard
        self.with_entropy = algorithm.needs.entropy
        self._fresh = np.isin(tokens.sequence_of, fresh_sequences(batch))
        self._policy: list[Metrics] = []
        self._critic: list[Metrics] = []
        self._supervised: list[Metrics] = []
        self._coefficients = 0.0
        self._steps = batch.steps
        self._weights = np.zeros(len(tokens.mask))

    def of_policy(self, step: IntArray) -> Loss:
        """The policy's loss in an optimizer step on the sequences `step`."""
        weight = self._algorithm.coefficients(self._tokens, self._advantages, step)
        self._coefficients += float(weight.sum())
        self._weights += weight

        def loss(batch: MicroBatch, output: Tensor) -> Tensor:
            logprobs, entropy = output if self.with_entropy else (output, None)
            value, metrics = self._algorithm.loss(self.inputs(batch, logprobs, weight, entropy))
            self._policy.append(
                {**metrics, "padding_fraction": (torch.tensor(batch.padding), torch.tensor(batch.targets.numel()))}
            )
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

    def trained_samples(self) -> TrainedSamples:
        """What the optimizer steps did with each sample."""
        count = len(self._tokens)
        steps: list[list[int]] = [[] for _ in range(count)]
        for number, step in enumerate(self._steps, start=1):
            for sequence in step.tolist():
                steps[sequence].append(number)
        of_response = self._tokens.version >= 0
        sums = np.bincount(self._tokens.sequence_of, weights=self._weights, minlength=count)
        return TrainedSamples(
            advantages=self._advantages.advantages[of_response],
            weights=(sums / max(1, len(steps[0]))).astype(np.float32),
            steps=np.array(steps, dtype=np.int32),
        )

    def reduced(self) -> dict[str, float]:
        """Every metric over all micro-batches and data ranks. Collective."""
        policy, critic, rows = (over_ranks(self._shard, parts) for parts in (self._policy, self._critic, self._supervised))
        if "policy_loss" in policy:  # skipped sequences have loss 0, but their coefficients count
            policy["policy_loss"] = (policy["policy_loss"][0], self._coefficients)
        return finish(policy) | finish(critic) | finish(rows)


def over_ranks(shard: DataShard, parts: list[Metrics]) -> dict[str, tuple[float, float]]:
    """Combines the metrics of all data ranks' micro-batches, which are on the last stage. Collective.

    Ranks may have different numbers of micro-batches, or none, so they exchange names together with numbers.
    """
    found = combine(parts)
    for group in shard.groups:
        found = combine(json.loads(other) for other in shard.gather(json.dumps(found).encode(), group))
    return found
