"""verl's engines and its newer trainer: layouts, schedules and samples of older weights, worked out by hand."""

from typing import Any

import pytest

from polyreme.import_config.rules import Fate
from support.imports import import_text, lost_keys, mathematics

ACTOR = "actor_rollout_ref.actor"
BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ACTOR}.optim.lr": 1e-6,
    "actor_rollout_ref.rollout.n": 8,
    "trainer.total_training_steps": 10,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 2,
}


def script(values: dict[str, Any]) -> str:
    return "python3 -m verl.trainer.main_ppo " + " ".join(f"'{key}={value}'" for key, value in (BASE | values).items()) + "\n"


def read(values: dict[str, Any]) -> tuple[list[str], dict[str, Any], Any]:
    found, run = import_text(script(values), suffix=".sh")
    return lost_keys(found), mathematics(run), run


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 4}, "tensor 1 x context 4 x data 4"),
        ({"model_engine": "veomni", f"{ACTOR}.veomni.ulysses_parallel_size": 4}, "tensor 1 x context 4 x data 4"),
        ({f"{ACTOR}.strategy": "torchtitan", f"{ACTOR}.torchtitan.tensor_parallel_size": 4}, "tensor 4 x data 4"),
        ({"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 8}, "tensor 8 x data 2"),
    ],
)
def test_data_ranks_are_the_devices_that_an_engine_leaves(values: dict[str, Any], layout: str) -> None:
    lost, trained, _ = read(values)
    assert lost == [] and trained["ranks"][0] == layout


def test_torchtitans_rate_falls_linearly_without_a_key_of_it() -> None:
    """LRSchedulersContainer: decay_type linear from the end of the warm-up, to min_lr_factor x lr."""
    run = read({"model_engine": "torchtitan", f"{ACTOR}.optim.lr_scheduler_type": "constant"})[2]
    assert (run.trainer.optimizer.schedule, run.trainer.optimizer.min_lr, run.trainer.optimizer.eps) == ("linear", 0.0, 1e-8)
    given = {f"{ACTOR}.optim.decay_type": "cosine", f"{ACTOR}.optim.min_lr_factor": 0.1, f"{ACTOR}.optim.eps": 1e-6}
    run = read({"model_engine": "torchtitan", **given})[2]
    assert run.trainer.optimizer.schedule == "cosine" and run.trainer.optimizer.min_lr == pytest.approx(1e-7)
    assert run.trainer.optimizer.eps == 1e-6


def test_megatrons_other_optimizers_are_lost() -> None:
    lost = read({f"{ACTOR}.optim.optimizer": "muon", f"{ACTOR}.optim.muon_momentum": 0.9})[0]
    assert lost == [f"{ACTOR}.optim.optimizer"]


def test_samples_of_older_weights_are_said() -> None:
    """colocate_async continues long responses with newer weights; sync is on-policy."""
    mode = "trainer.v1.trainer_mode"
    assert read({mode: "sync", "trainer.v1.sampler.max_off_policy_threshold": 8})[0] == []
    lost = read({mode: "colocate_async", "trainer.v1.sampler.max_off_policy_threshold": 4})[0]
    assert lost == [mode, "trainer.v1.sampler.max_off_policy_threshold"]
    assert read({mode: "colocate_async", "trainer.use_v1": False})[0] == []


def test_the_separate_trainer_steps_once_per_part_of_the_batch() -> None:
    """train_batch_size = parameter_sync_step x ppo_mini_batch_size: four steps between two versions of the weights."""
    values = {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.parameter_sync_step": 4}
    nodes = {"actor_rollout_ref.rollout.nnodes": 1, "actor_rollout_ref.rollout.n_gpus_per_node": 8}
    _, trained, run = read(values | nodes)
    assert trained["batch"] == (64, 8, 4, 1)
    assert (run.placement, run.max_staleness, run.rollout.replicas) == ("separate", 1, 4)


def test_samples_of_an_earlier_run_are_said() -> None:
    assert read({"skip.rollout.enable": True, "skip.rollout.steps": "[1]"})[0] == ["skip.rollout.enable"]
    assert read({"actor_rollout_ref.rollout.skip_rollout": True})[0] == ["actor_rollout_ref.rollout.skip_rollout"]
    assert read({"skip.rollout.enable": False})[0] == []


@pytest.mark.parametrize(
    ("metric", "penalty", "lost"),
    [
        ("acc", True, []),
        ("score", False, []),
        ("score", True, ["algorithm.filter_groups.metric"]),
        ("seq_final_reward", False, []),
    ],
)
def test_a_filter_that_sees_the_penalty_is_said(metric: str, penalty: bool, lost: list[str]) -> None:
    """Here groups are compared before the penalty near the length limit; verl's `score` has it, `acc` has not."""
    overlong = {"reward_model.overlong_buffer.enable": penalty, "reward_model.overlong_buffer.len": 128}
    assert read({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": metric, **overlong})[0] == lost


def test_a_key_of_the_newer_trainer_that_is_unknown_is_said() -> None:
    found, _ = import_text(script({"trainer.v1.sampler.prioritise": True}), suffix=".sh")
    assert [entry.fate for entry in found.lost] == [Fate.UNKNOWN]


def test_evaluations_that_sample_otherwise_are_to_be_decided() -> None:
    """DAPO's script: one answer, sampled with top_p 0.7; here one answer is greedy, and several are from the whole distribution."""
    base = "actor_rollout_ref.rollout.val_kwargs."
    values = {f"{base}n": 1, f"{base}do_sample": True, f"{base}temperature": 1.0, f"{base}top_p": 0.7, f"{base}top_k": -1}
    found, run = import_text(script(values), suffix=".sh")
    assert (run.eval_answers, run.eval_temperature) == (1, 1.0)
    assert "CHECK" in found.comments["eval_answers"] and "top_p 0.7" in found.comments["eval_temperature"]
    found, _ = import_text(script(values | {f"{base}n": 8, f"{base}top_p": 1.0}), suffix=".sh")
    assert "CHECK" not in found.comments["eval_answers"] + found.comments["eval_temperature"]
