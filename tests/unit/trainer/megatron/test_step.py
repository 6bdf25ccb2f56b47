"""The step around the models: what is measured of which policy, and which samples are run."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyreme.config.presets import resolve
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batch import IGNORE, Sequences, collect, supervised
from polyreme_trainer.megatron.roles import Role
from polyreme_trainer.megatron.shard import DataShard
from polyreme_trainer.megatron.step import Iteration, Losses, Models, Trained, train_iteration, values_after_end

ALGORITHM = Algorithm(resolve("grpo", {"kl": None, "aggregation": "token-mean"}), longest=8)


@dataclass
class Drifting:
    """A model that gives every token the log-probability -1 until it is stepped, and -2 from then on. It is its own optimizer."""

    steps: int = 0
    rows: list[int] = field(default_factory=list)
    """Of each forward pass with a gradient."""
    arch = SimpleNamespace(active_parameters=1000, layers=2, queries=8, sliding=())
    alignment: int = 1

    def zero_grad(self) -> None: ...
    def set_lr(self, lr: float) -> None: ...

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


WHOLE = [(1, 0, 4)]
"""The spans of a sample that version 1 sampled alone: the policy before iteration 2."""


def trained(model: Drifting, scores: list[list[float]], spans: list[tuple[int, int, int]] = WHOLE, steps: int = 1) -> Trained:
    """One iteration on groups of made-up samples with these scores."""
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, np.uint8)
    groups = [
        GroupRecord(number, 1, ids, [SampleRecord(ids, np.full(4, -1.0, np.float32), mask, 1, spans, s) for s in row])
        for number, row in enumerate(scores)
    ]
    stand_in: Any = model
    actor = Role("actor", stand_in, model.forward, DataShard(torch.device("cpu"), 64))
    actor.optimizer = stand_in
    models: Models = SimpleNamespace(actor=actor, reference=None, critic=None, shard=actor.shard)
    sequences, tokens = collect(groups)
    parts = np.array_split(np.arange(len(sequences)), steps)
    return train_iteration(Iteration(2, sequences, tokens, parts, AlgorithmState(), 1e-3), ALGORITHM, models)


def test_an_iteration_without_advantages_measures_the_policy_that_sampled() -> None:
    """The optimizer's moments move the weights even then."""
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


class Table(torch.nn.Module):
    """Every token id has a log-probability of its own, in float64. It is its own optimizer, which keeps the weights."""

    arch = SimpleNamespace(active_parameters=1000, layers=2, queries=8, sliding=())
    alignment: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-2.0, -0.5, 9, dtype=torch.float64))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table[batch.targets[batch.targets != IGNORE]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def set_lr(self, lr: float) -> None: ...

    def step(self) -> float:
        return 0.0


def gradient_of_mixed_step(shards: list[DataShard]) -> torch.Tensor:
    """The gradient of one step on samples and supervised rows, summed over data ranks that each have a shard."""
    random = np.random.default_rng(3)
    ids = [random.integers(0, 9, length).astype(np.int32) for length in (3, 7, 5, 2)]
    masks = [np.ones(len(x), np.uint8) for x in ids]
    samples = [
        SampleRecord(x, np.full(len(x), -1.0, np.float32), mask, 1, [(1, 0, len(x))], score)
        for x, mask, score in zip(ids, masks, (0.0, 1.0, 0.3, 0.7), strict=True)
    ]
    sequences, tokens = collect([GroupRecord(0, 1, ids[0], samples)])
    rows = supervised(ids, masks)
    batch = Iteration(2, sequences, tokens, [np.arange(4)], AlgorithmState(), 1e-3)
    advantages, total = ALGORITHM.advantages(tokens), torch.zeros(9, dtype=torch.float64)
    for shard in shards:
        model: Any = Table()
        actor = Role("actor", model, model.forward, shard)
        actor.optimizer = model
        losses = Losses(batch, ALGORITHM, tokens, advantages, shard)
        mixed = [losses.of_rows(rows, 0.7)]
        actor.update(sequences, np.arange(4), losses.of_policy(np.arange(4)), 1e-3, further=mixed)
        total += torch.zeros(9) if model.table.grad is None else model.table.grad
    return total


@pytest.mark.parametrize(
    "shards", [[(0, 1, 7)], [(0, 1, 14)], [(0, 2, 64), (1, 2, 64)], [(rank, 6, 8) for rank in range(6)]], ids=str
)
def test_mixed_rows_have_one_gradient_over_micro_batches_and_data_ranks(shards: list[tuple[int, int, int]]) -> None:
    """Also where a rank has no sequence at all."""
    cpu = torch.device("cpu")
    expected = gradient_of_mixed_step([DataShard(cpu, 4096)])
    found = gradient_of_mixed_step([DataShard(cpu, tokens, rank, ranks) for rank, ranks, tokens in shards])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_an_iteration_says_what_it_did_with_each_sample() -> None:
    found = trained(Drifting(), [[1.0, 0.0], [0.0, 0.0]], steps=2).samples
    advantages = found.advantages.reshape(4, 4)
    assert (advantages == advantages[:, :1]).all(), "one advantage per sample"
    assert advantages[0, 0] > 0 > advantages[1, 0] and not advantages[2:].any()
    assert found.steps.tolist() == [[1], [1], [2], [2]]
    assert found.weights.tolist() == [0.5, 0.5, 0.5, 0.5], "each step's loss is a mean over its two samples"
