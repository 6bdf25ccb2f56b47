"""The step around the models: the policy behind each metric, and the computed samples."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyreme.config.recipes.presets import resolve
from polyreme.experience.records import EpisodeRecord, GroupRecord, SampleRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import IGNORE, Sequences
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.iteration import Iteration, Trained
from polyreme_trainer.megatron.training.roles import Role
from polyreme_trainer.megatron.training.step import Models, Stopwatch, before_advantages, train_iteration, values_after_end
from support.episodes import branched, episode_group

ALGORITHM = Algorithm(resolve("grpo", {"kl": None, "aggregation": "token-mean"}), longest=8)


@dataclass
class Drifting:
    """A model that gives every token the log-probability -1 before its first step, and -2 afterwards. It is its own optimizer."""

    steps: int = 0
    rows: list[int] = field(default_factory=list)
    """The sequences of each forward pass with a gradient."""
    arch = SimpleNamespace(active_parameters=1000, layers=2, queries=8, sliding=())
    alignment, joins_beginnings = 1, False
    routing: Any = None
    rank = Rank()

    def zero_grad(self) -> None: ...
    def set_lr(self, lr: float) -> None: ...
    def use(self) -> None: ...

    def step(self) -> float:
        self.steps += 1
        return 0.0

    def forward(self, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.rows.append(len(batch.indices))
        return torch.full((len(batch.tokens),), -1.0 - self.steps, requires_grad=torch.is_grad_enabled())


@dataclass
class PositionValues(Drifting):
    """A critic whose value of a prefix is its number of tokens."""

    def forward(self, batch: Any) -> torch.Tensor:
        positions = torch.cat([torch.arange(length) for length in batch.ids.lengths])
        return positions[batch.targets != IGNORE].float() + 1


def test_a_truncated_response_goes_on_with_the_value_after_its_last_token() -> None:
    sequences = Sequences([np.arange(4), np.arange(7), np.arange(5)], np.ones(3 + 6 + 4, np.float32))
    stand_in: Any = PositionValues()
    critic = Role("critic", stand_in, stand_in.forward, DataShard(torch.device("cpu"), 64))
    assert values_after_end(critic, sequences, np.array([1, 2])).tolist() == [0, 7, 5]


def test_an_episode_goes_on_with_the_value_after_its_last_trajectory() -> None:
    """Only where a bound ended it. The critic's value of a prefix is its number of tokens."""
    group = replace(branched(episode_group(4)), episodes=[EpisodeRecord(number) for number in (1, 3, 4, 5)])
    stand_in: Any = PositionValues()
    critic = Role("critic", stand_in, stand_in.forward, DataShard(torch.device("cpu"), 4096))
    sequences, tokens = collect([group])
    batch = Iteration(2, sequences, tokens, [], AlgorithmState(), 1e-3)
    algorithm = Algorithm(resolve("ppo", {"advantage": {"bootstrap_truncated": True}, "kl": None}), longest=64)
    models: Models = SimpleNamespace(actor=critic, reference=None, critic=critic, shard=critic.shard)
    found = before_advantages(batch, algorithm, models, Stopwatch()).final_values
    lasts = {sample.episode: len(group.prompt_of(sample)) + len(sample) for sample in group.samples}
    assert found is not None and found.tolist() == [0, lasts[1], lasts[2], lasts[3]]
    assert len(group.samples) > len(lasts)


WHOLE = [(1, 0, 4)]
"""The spans of a sample that only version 1, the policy before iteration 2, sampled."""


def trained(
    model: Drifting,
    scores: list[list[float]],
    spans: list[tuple[int, int, int]] = WHOLE,
    steps: int = 1,
    algorithm: Algorithm = ALGORITHM,
    reference: Role[Any] | None = None,
    trains_actor: bool = True,
) -> Trained:
    """Trains one iteration on groups of synthetic samples with these scores."""
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, np.uint8)
    groups = [
        GroupRecord(number, 1, ids, [SampleRecord(ids, np.full(4, -1.0, np.float32), mask, 1, spans, s) for s in row])
        for number, row in enumerate(scores)
    ]
    stand_in: Any = model
    actor = Role("actor", stand_in, model.forward, DataShard(torch.device("cpu"), 64))
    actor.optimizer = stand_in
    models: Models = SimpleNamespace(actor=actor, reference=reference, critic=None, shard=actor.shard)
    sequences, tokens = collect(groups)
    parts = np.array_split(np.arange(len(sequences)), steps)
    iteration = Iteration(2, sequences, tokens, parts, AlgorithmState(kl_coef=0.5), 1e-3, trains_actor=trains_actor)
    return train_iteration(iteration, algorithm, models)


def test_an_iteration_without_advantages_measures_the_policy_that_sampled() -> None:
    """Even then, the optimizer's moments move the weights."""
    model = Drifting()
    result = trained(model, [[1.0, 1.0]])
    assert (model.steps, model.rows) == (1, [])
    assert (result.metrics["mismatch_kl"], result.metrics["trained_samples"]) == (0.0, 0)


def test_a_probe_in_an_iteration_of_several_steps_knows_the_old_policy() -> None:
    result = trained(Drifting(), [[1.0, 1.0], [0.0, 0.0]], steps=2)
    assert (result.metrics["actor/ppo_kl"], result.metrics["mismatch_kl"]) == (0.0, 0.0)


@pytest.mark.parametrize("spans", [[(0, 0, 4)], [(0, 0, 2), (1, 2, 4)]], ids=["another version", "over a swap"])
def test_samples_that_the_policy_did_not_sample_alone_do_not_measure_the_mismatch(spans: list[tuple[int, int, int]]) -> None:
    result = trained(Drifting(), [[1.0, 0.0]], spans)
    assert result.metrics["mismatch_kl"] is None


def test_samples_without_advantage_are_not_run_and_still_count() -> None:
    model = Drifting()
    result = trained(model, [[1.0, 1.0], [0.0, 1.0]])
    assert sum(model.rows) == 2
    assert result.metrics["trained_samples"] == 2
    assert result.metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-7)  # a group's advantages add up to 0, all ratios are 1


class Balanced:
    """Routers that are balanced over the tokens of each step."""

    balances = True

    def micro_batch(self, batch: Any, replays: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, tokens: int, *functions: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def update_biases(self) -> None: ...

    def metrics(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("trains_actor", [True, False])
def test_samples_without_advantage_are_run_for_the_balance_of_experts(trains_actor: bool) -> None:
    model = Drifting()
    model.routing = Balanced()
    result = trained(model, [[1.0, 1.0], [0.0, 1.0]], trains_actor=trains_actor)
    assert sum(model.rows) == 4 * trains_actor
    assert result.metrics["trained_samples"] == 2 * trains_actor


def test_an_iteration_says_what_it_did_with_each_sample() -> None:
    found = trained(Drifting(), [[1.0, 0.0], [0.0, 0.0]], steps=2).samples
    advantages = found.advantages.reshape(4, 4)
    assert (advantages == advantages[:, :1]).all(), "one advantage per sample"
    assert advantages[0, 0] > 0 > advantages[1, 0] and not advantages[2:].any()
    assert found.steps.tolist() == [[1], [1], [2], [2]]
    assert found.weights.tolist() == [0.5, 0.5, 0.5, 0.5], "each step's loss is a mean over its two samples"


@pytest.mark.parametrize("trains_actor", [True, False])
def test_a_probe_is_no_optimizer_step(trains_actor: bool) -> None:
    """Its samples have the weights of the steps alone, and its loss is not the policy's."""
    result = trained(Drifting(), [[1.0, float(trains_actor)], [0.0, 0.0]], steps=2, trains_actor=trains_actor)
    assert result.samples.weights.tolist() == [0.5 * trains_actor] * 4
    assert result.metrics.get("actor/pg_loss") == (0.0 if trains_actor else None)


def test_the_policy_loss_is_the_mean_of_the_losses_of_the_steps() -> None:
    """This includes aggregations whose coefficients do not sum to 1: here a sum over 4 tokens, divided by 8."""
    result = trained(Drifting(), [[1.0, 0.0]], steps=2, algorithm=Algorithm(resolve("dr_grpo", {}), longest=8))
    first, second = -0.5 * 4 / 8, 0.5 * 0.8 * 4 / 8  # the ratio is 1, then 1 / e, clipped at 0.8
    assert result.metrics["actor/pg_loss"] == pytest.approx((first + second) / 2)


@pytest.mark.parametrize("trains_actor", [True, False])
def test_the_kl_controller_rests_while_only_the_critic_warms_up(trains_actor: bool) -> None:
    """The policy is the reference until then: a controller that saw a KL of 0 would lower the coefficient."""
    adaptive = {"kl": {"adaptive": {"target": 6.0, "horizon": 100}}}
    stand_in: Any = Drifting()
    reference = Role("reference", stand_in, stand_in.forward, DataShard(torch.device("cpu"), 64))
    algorithm = Algorithm(resolve("reinforce_pp", adaptive), longest=8)
    result = trained(Drifting(), [[1.0, 0.0]], algorithm=algorithm, reference=reference, trains_actor=trains_actor)
    assert result.state.kl_coef is not None
    assert (result.state.kl_coef < 0.5) == trains_actor
