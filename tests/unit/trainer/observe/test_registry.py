"""The registry of metrics has MindSpeed RL's names, and a row for every metric of an iteration."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from metric_rows import BESIDE, DEVICES, EPISODES, METRICS, OFFLOAD, REPLAY, RESOURCES, ROUTING, find

from polyreme.config.recipes.presets import resolve
from polyreme.config.reward import RewardConfig
from polyreme.config.run import RunConfig
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import split_steps, supervised
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.followers import Followers
from polyreme_trainer.megatron.training.iteration import Iteration
from polyreme_trainer.megatron.training.roles import Role
from polyreme_trainer.megatron.training.step import train_iteration
from polyreme_trainer.observe.metrics import iteration_record
from support.configs import run_config

TIMING = [
    "all",
    "update",
    "rollout",
    "old_log_p",
    "reference_model",
    "resharding_to_train",
    "resharding_to_infer",
    "adv",
    "non_overlap_reference_model",
    "non_overlap_rule_reward",
    "non_overlap_reward_model",
    "non_overlap_adv",
    "rule_reward",
    "reward_model",
    "ref_onload",
    "ref_offload",
    "critic_model",
    "update_critic",
]
SERIES = (
    "critic/score",
    "critic/rewards",
    "critic/advantages",
    "critic/returns",
    "critic/values",
    "response_length",
    "prompt_length",
)
DOCUMENTED = [
    *(f"timing/{name}" for name in TIMING),
    *(f"{series}/{key}" for series in SERIES for key in ("mean", "max", "min")),
    *(f"actor/{name}" for name in ("entropy", "kl_loss", "pg_loss", "pg_clipfrac", "ppo_kl", "lr")),
    *(
        "grad_norm",
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/lr",
        "exact_rewards/mean",
        "e2e_tps",
        "update_tps",
        "vllm_tps",
    ),
]
"""MindSpeed RL's metrics of a PPO run; `exact` is the verifier's name."""

OF_OTHER_RUNS = ("ptx_loss", "reference/version", "actor/teacher_kl")
"""Metrics of supervised rows, a renewed reference and a teacher, which these runs do not have."""


class Lookup(torch.nn.Module):
    """A number for each token id: the smallest model that a role can train."""

    arch = SimpleNamespace(active_parameters=8, layers=1, queries=2, sliding=())
    alignment, joins_beginnings = 1, False
    routing = None
    rank = Rank()
    dtype = "float32"

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1.5, -0.5, 8))
        self.adam = torch.optim.Adam(self.parameters())

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table[batch.targets[batch.targets >= 0]]

    def weights(self) -> dict[str, torch.Tensor]:
        return self.state_dict()

    def use(self, *others: Any) -> None:
        """There is no other memory."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adam.zero_grad()

    def set_lr(self, lr: float) -> None:
        self.adam.param_groups[0]["lr"] = lr

    def step(self) -> float:
        self.adam.step()
        return 1.0


def role(name: str) -> Role[Any]:
    model: Any = Lookup()
    made = Role(name, model, model.forward, DataShard(torch.device("cpu"), 64))
    made.optimizer = model
    return made


def group(index: int, scores: list[float]) -> GroupRecord:
    rng = np.random.default_rng(index)

    def sample(score: float) -> SampleRecord:
        length = int(rng.integers(2, 6))
        ids = rng.integers(0, 8, length).astype(np.int32)
        parts = [RewardPart("exact", score, score), RewardPart("exact/length", 1.0, 0.0)]
        return SampleRecord(ids, np.full(length, -1.0, np.float32), np.ones(length, np.uint8), 1, [(1, 0, length)], score, parts)

    return GroupRecord(
        index, 1, np.arange(3, dtype=np.int32), [sample(s) for s in scores], generate_seconds=0.5, score_seconds=0.1
    )


def ppo_record(config: RunConfig, **algorithm: Any) -> dict[str, Any]:
    """The record of a real PPO iteration of two optimizer steps, on tiny models."""
    groups = [group(0, [1.0, 0.0]), group(1, [0.0, 0.5])]
    actor, critic, reference = role("actor"), role("critic"), role("reference")
    models: Any = SimpleNamespace(actor=actor, critic=critic, reference=reference, shard=actor.shard)
    models.logprobs_and_entropies = lambda batch: torch.stack([actor.output(batch), -actor.output(batch)])
    models.supervised_logprobs = actor.output
    sequences, tokens = collect(groups)
    if algorithm.get("teacher_coef"):
        tokens = replace(tokens, teacher=tokens.behaviour)
    steps, rows = split_steps(tokens.group, 2, 1, (0, 2)), supervised([np.arange(5, dtype=np.int32)], [np.ones(5, np.uint8)])
    batch = Iteration(2, sequences, tokens, steps, AlgorithmState(), 1e-3, 1e-3, mixed=[rows, rows], ptx_coef=0.1)
    followers = Followers(actor.model, lambda name, dtype: role(name), renew_interval=1, decay=None)
    trained = train_iteration(batch, Algorithm(resolve("ppo", algorithm), longest=8), models)
    measured = trained.metrics | followers.follow(2) | {f"timing/{part}": seconds for part, seconds in trained.seconds.items()}
    seconds = {"iteration": 2.0, "learner_wait": 1.0, "train": 0.5, "write": 0.1}
    return dict(iteration_record(2, groups, measured, seconds, 100.0, config).metrics)


KL_IN_LOSS = {"kl": {"place": "loss", "estimator": "k3"}, "entropy_coef": 0.01, "loss": {"dual": 3.0}}
CORRECTED = {"correction": [{"kind": "token_tis"}]}
DISTILLED = {"teacher_coef": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "KL in the reward": {},
    "KL in the loss": KL_IN_LOSS,
    "corrected": CORRECTED,
    "distilled": DISTILLED,
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_name_has_a_row(name: str) -> None:
    metric = find(name)
    assert metric is not None and metric.unit and metric.formula.endswith(".")


def test_no_name_has_two_rows() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS)
def test_everything_that_an_iteration_writes_has_a_row(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    record = ppo_record(run_config(tmp_path), **algorithm)
    assert [name for name in record if find(name) is None] == []


def test_a_ppo_iteration_writes_every_documented_metric(tmp_path: Path) -> None:
    assert [name for name in DOCUMENTED if name not in ppo_record(run_config(tmp_path), **KL_IN_LOSS)] == []


def test_every_row_of_an_iteration_is_written_by_one(tmp_path: Path) -> None:
    written: set[str] = set()
    for algorithm in VARIANTS.values():
        written |= ppo_record(run_config(tmp_path), **algorithm).keys()
    conditional = (*BESIDE, *DEVICES, *EPISODES, *OFFLOAD, *RESOURCES, *ROUTING, *REPLAY)
    rows = set(METRICS) - set(conditional) - {find(name) for name in OF_OTHER_RUNS}
    assert [row.name for row in rows if not any(row.matches(name) for name in written)] == []


def test_the_parts_are_measured_and_the_rates_follow_from_them(tmp_path: Path) -> None:
    record = ppo_record(run_config(tmp_path))
    assert all(
        record[f"timing/{part}"] > 0
        for part in ("old_log_p", "reference_model", "critic_model", "adv", "update", "update_critic")
    )
    tokens = (record["response_length/mean"] + record["prompt_length/mean"]) * 4
    assert record["e2e_tps"] == pytest.approx(tokens / 2 / 2.0)  # one rank and one replica
    assert record["update_tps"] == pytest.approx(tokens / record["timing/update"])
    assert record["vllm_tps"] == pytest.approx(tokens / 0.5)
    assert record["timing/non_overlap_rule_reward"] == pytest.approx(0.1)


def test_shared_devices_count_once(tmp_path: Path) -> None:
    apart, together = (ppo_record(run_config(tmp_path, placement=placement)) for placement in ("separate", "colocated"))
    assert together["e2e_tps"] == pytest.approx(2 * apart["e2e_tps"])


def test_scoring_counts_for_the_kinds_of_rewards_that_there_are(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    rule = ppo_record(config)
    assert (rule["timing/rule_reward"], rule["timing/reward_model"]) == (0.1, 0.0)
    model = ppo_record(config.model_copy(update={"reward": RewardConfig.model_validate({"rewards": [{"model": tmp_path}]})}))
    assert (model["timing/rule_reward"], model["timing/reward_model"]) == (0.0, 0.1)
