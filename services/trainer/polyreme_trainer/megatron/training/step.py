"""One iteration of training: advantages of the whole batch, then optimizer steps over micro-batches and data ranks.

Invariant: the algorithm decides which samples have a gradient, and all ranks take the same optimizer steps, even if none has one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from polyreme.experience.record_codec import TrainedSamples
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch, sequence_of, sequence_sums
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.mixing import ptx_loss
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, MicroBatch, Sequences, with_end
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.iteration import PARTS, Iteration, Trained, episodes_of, fresh_sequences
from polyreme_trainer.megatron.training.losses import IterationLosses, over_ranks
from polyreme_trainer.megatron.training.replay import mismatch
from polyreme_trainer.megatron.training.roles import AnyRole, LossTerm, everything

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
    def actor(self) -> AnyRole: ...
    @property
    def reference(self) -> AnyRole | None: ...
    @property
    def critic(self) -> AnyRole | None: ...
    @property
    def shard(self) -> DataShard: ...

    def logprobs_and_entropies(self, batch: MicroBatch) -> Tensor:
        """The actor's log-probabilities and entropies of the trained tokens, fp32 [2, k]."""

    def supervised_logprobs(self, batch: MicroBatch) -> Tensor:
        """The actor's log-probabilities of the trained tokens of supervised rows, fp32 [k]."""


def train_iteration(batch: Iteration, algorithm: Algorithm, models: Models) -> Trained:
    """Runs every optimizer step of one iteration.

    With a single step, the old log-probabilities are those of the step's own forward pass; with several steps they are computed
    first. Sequences without a gradient are skipped, unless the step balances experts over all tokens. When no sequence is run, a
    few are, to measure the mismatch. The optimizer steps in any case, so that its moments decay.
    """
    clock = Stopwatch()
    sequences, tokens = batch.sequences, before_advantages(batch, algorithm, models, clock)
    with clock.part("adv"):
        advantages = algorithm.advantages(tokens, batch.state)
        moving = np.zeros(len(sequences), dtype=np.bool_)
        if batch.trains_actor:
            moving = algorithm.has_gradient(tokens, advantages)[episodes_of(sequences, tokens)] & (sequences.trained > 0)
        computed = moving | (sequences.trained > 0) if batch.trains_actor and models.actor.balances else moving
        parts = [step[computed[step]] for step in batch.steps]
    needed = np.unique(np.concatenate(parts))
    probed = needed if len(needed) else fresh_sequences(batch)[:PROBE]
    if len(parts) > 1 and tokens.old is None:
        with clock.part("old_log_p"):
            tokens = replace(tokens, old=models.actor.forward(sequences, probed))
    if models.reference is not None and tokens.reference is None:
        with clock.part("reference_model"):
            tokens = replace(tokens, reference=models.reference.forward(sequences, probed))
    replayed = mismatch(models.actor, sequences, tokens, fresh_sequences(batch)[:PROBE]) if models.actor.replays else {}
    losses = IterationLosses(batch, algorithm, tokens, advantages)
    forward = models.logprobs_and_entropies if algorithm.needs.entropy else models.actor.output
    found, weights = list[Metrics](), np.zeros(len(tokens.mask))
    if not len(needed):  # no optimizer step takes this loss: only its metrics count, which measure the mismatch
        found += models.actor.measure(LossTerm(sequences, probed, losses.policy(probed), forward))
    norms, critic_norms, routed = [], [], list[Metrics]()
    for number, (step, part) in enumerate(zip(batch.steps, parts, strict=True)):
        if batch.trains_actor:
            with clock.part("update"):
                loss = losses.policy(step)
                terms = [LossTerm(sequences, part, loss, forward), *mixed_terms(batch, number, models)]
                found += models.actor.forward_backward(*terms)
                norms.append(models.actor.optim_step(batch.lr))
            routed.append(models.actor.routing_metrics)
            weights += loss.weight
    if (critic := models.critic) is not None:  # after the actor's steps, so that each model moves to the device once
        for step in batch.steps:
            trained = step[sequences.trained[step] > 0]
            with clock.part("update_critic"):
                found += critic.forward_backward(LossTerm(sequences, trained, losses.critic(step)))
                critic_norms.append(critic.optim_step(batch.critic_lr))
    measured: dict[str, float | None] = {
        "mismatch_kl": None,
        **finish(advantages.metrics),
        **finish(step_means(over_ranks(models.shard, found), len(norms))),
        **finish(combine(routed)),
        **replayed,
    }
    measured |= {"grad_norm": float(np.mean(norms)) if norms else 0.0, "actor/lr": batch.lr if batch.trains_actor else 0.0}
    if models.critic is not None:
        measured |= {"critic/grad_norm": float(np.mean(critic_norms)), "critic/lr": batch.critic_lr}
    measured["trained_samples"] = int((moving & has_advantage(sequences, advantages)).sum())
    named = {RECORDED_AS.get(name, name): value for name, value in measured.items()}
    state = advantages.state
    if not batch.trains_actor:  # while the policy equals the reference, the KL is 0 and must not change the coefficient
        state = replace(state, kl_coef=batch.state.kl_coef)
    return Trained(named, state, trained_samples(batch, advantages, weights), clock.seconds)


def mixed_terms(batch: Iteration, number: int, models: Models) -> list[LossTerm[Metrics]]:
    """The supervised rows of optimizer step `number`, counted from 0."""

    def term(rows: Sequences) -> LossTerm[Metrics]:
        tokens = int(rows.trained.sum())

        def loss(_: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Metrics]:
            return ptx_loss(logprobs, tokens, batch.ptx_coef)

        return LossTerm(rows, everything(rows), loss, models.supervised_logprobs)

    return [term(rows) for rows in batch.mixed[number : number + 1]]


def step_means(sums: dict[str, tuple[float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """The metrics with the policy's loss as the mean over optimizer steps: the sum over a step's tokens is the step's loss, even
    if its coefficients do not add up to 1."""
    return {name: (value, steps if name == "policy_loss" else weight) for name, (value, weight) in sums.items()}


def trained_samples(batch: Iteration, advantages: Advantages, weights: np.ndarray) -> TrainedSamples:
    """How optimizer steps used each sample. Its advantages are those of the tokens that the policy sampled, trained on or not.

    Args:
        weights: float64 [t], the sums of each token's coefficients in the policy's steps.
    """
    count = len(batch.sequences)
    steps: list[list[int]] = [[] for _ in range(count)]
    for number, step in enumerate(batch.steps, start=1):
        for sequence in step.tolist():
            steps[sequence].append(number)
    sums = np.bincount(sequence_of(batch.sequences.offsets), weights=weights, minlength=count)
    return TrainedSamples(
        advantages=advantages.advantages[batch.tokens.version >= 0],
        weights=(sums / max(1, len(steps[0]))).astype(np.float32),
        steps=np.array(steps, dtype=np.int32),
    )


def before_advantages(batch: Iteration, algorithm: Algorithm, models: Models, clock: Stopwatch) -> TokenBatch:
    """The batch with the inputs that the algorithm's advantages need: values, reference and old log-probabilities."""
    sequences, tokens, needs = batch.sequences, batch.tokens, algorithm.needs
    every = np.flatnonzero(sequences.trained > 0)
    if needs.critic:
        assert models.critic is not None
        with clock.part("critic_model"):
            tokens = replace(tokens, values=models.critic.forward(sequences, every))
    if needs.final_values:
        assert models.critic is not None
        with clock.part("critic_model"):
            last = np.flatnonzero(np.diff(episodes_of(sequences, tokens), append=len(tokens)))  # each episode's last trajectory
            ended = last[tokens.truncated & (tokens.lengths > 0)]
            tokens = replace(tokens, final_values=values_after_end(models.critic, sequences, ended)[last])
    if needs.old:
        with clock.part("old_log_p"):
            tokens = replace(tokens, old=models.actor.forward(sequences, every))
    if needs.old and models.reference is not None:
        with clock.part("reference_model"):
            tokens = replace(tokens, reference=models.reference.forward(sequences, every))
    return tokens


def values_after_end(critic: AnyRole, sequences: Sequences, indices: IntArray) -> FloatArray:
    """float32 [n], the critic's value after the last token of the sequences `indices`; 0 for all others."""
    extended = with_end(sequences)
    values = np.zeros(len(sequences), dtype=np.float32)
    values[indices] = critic.forward(extended, indices)[extended.offsets[indices + 1] - 1]
    return values


def has_advantage(sequences: Sequences, advantages: Advantages) -> np.ndarray:
    """bool [n], whether a sequence has a token with an advantage other than 0."""
    return sequence_sums(advantages.advantages != 0, sequences.offsets) > 0
