"""Every kind of ours is reached by the import of a system that has it."""

from typing import Any, get_args

import pytest

from polyreme.config.recipes.presets import PRESETS
from polyreme.config.recipes.recipe import Aggregation, KlEstimator, Recipe
from polyreme.config.section import subsections
from polyreme.config.trainer import OptimizerConfig
from polyreme.import_config.application import apply
from polyreme.import_config.rules import ITERATIONS
from polyreme.import_config.systems import SYSTEMS, prepared

VERL, ACTOR, CORRECTION = "verl", "actor_rollout_ref.actor", "algorithm.rollout_correction"


def verl(**values: Any) -> dict[str, Any]:
    """Our values for verl's, with `__` for a dot."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    return run({"algorithm.adv_estimator": "grpo", **given})


def run(given: dict[str, Any], name: str = VERL) -> dict[str, Any]:
    return apply(SYSTEMS[name], {**prepared(SYSTEMS[name], given), ITERATIONS: 100}).values


ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gdpo")
LOSSES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "gpg")
WITHOUT_A_SYSTEM = {"raft"}
"""A recipe that no key of these systems names."""
DISTILLATION = {
    "distillation.enabled": True,
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.use_policy_gradient": True,
    "distillation.distillation_loss.use_task_rewards": False,
}
CASES: list[dict[str, Any]] = [
    *({"algorithm.adv_estimator": name} for name in ESTIMATORS),
    *({"algorithm.adv_estimator": "grpo", f"{ACTOR}.policy_loss.loss_mode": name} for name in LOSSES),
    {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    {"algorithm.adv_estimator": "grpo", **DISTILLATION},
]


def test_presets_and_losses() -> None:
    found = [run(case) for case in CASES] + [run({"megatron_training.stage": "ray_dapo"}, "mindspeed")]
    assert {values["algorithm.preset"] for values in found} == set(PRESETS) - WITHOUT_A_SYSTEM
    kinds = {kind.model_fields["kind"].default for kind in subsections(Recipe.model_fields["loss"])}
    assert {values["algorithm.loss.kind"] for values in found} == kinds


def test_aggregations() -> None:
    for name in get_args(Aggregation):
        assert verl(**{f"{ACTOR.replace('.', '__')}__loss_agg_mode": name})["algorithm.aggregation"] == name


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_kl_places_and_estimators(place: str) -> None:
    names = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs", "k1+": "kl+", "k3+": "k3+", "abs+": "abs+"}
    assert set(names) == set(get_args(KlEstimator))
    for ours, name in names.items():
        loss = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": name}
        reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": name}
        found = run({"algorithm.adv_estimator": "grpo", **(loss if place == "loss" else reward)})
        if (place, ours) == ("loss", "k1"):
            assert found["algorithm.kl"] is None  # it has no gradient in expectation, which the list of losses says
        else:
            assert (found["algorithm.kl.place"], found["algorithm.kl.estimator"]) == (place, ours)


def test_schedules_of_both_models() -> None:
    for name in get_args(OptimizerConfig.model_fields["schedule"].annotation):
        for section, target in ((ACTOR, "trainer.optimizer"), ("critic", "trainer.critic.optimizer")):
            found = run({"algorithm.adv_estimator": "gae", f"{section}.optim.lr_scheduler_type": name})
            assert found[f"{target}.schedule"] == name
    for name in ("constant", "linear", "cosine"):
        assert run({"actor_config.lr_decay_style": name}, "mindspeed")["trainer.optimizer.schedule"] == name
        assert run({"critic_lr_scheduler_type": name}, "paddlenlp")["trainer.critic.optimizer.schedule"] == name


def test_corrections() -> None:
    given: list[dict[str, Any]] = [
        {"rollout_is": "token"},
        {"rollout_is": "sequence"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        {"rollout_rs": "geometric", "rollout_rs_threshold": "0.99_1.01"},
        {"rollout_token_veto_threshold": 1e-4},
    ]
    found = [verl(**{f"{CORRECTION.replace('.', '__')}__{key}": value for key, value in each.items()}) for each in given]
    kinds = {kind.model_fields["kind"].default for kind in subsections(Recipe.model_fields["correction"])}
    assert {values["algorithm.correction"][0]["kind"] for values in found} == kinds


def test_sections_of_a_run_that_the_systems_have() -> None:
    """Layout, offload, experts, adapters: each key of ours that one of the systems has is set by it."""
    megatron = {
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "optimizer_offload": True,
        "param_offload": True,
        "override_transformer_config.moe_aux_loss_coeff": 0.1,
        "override_transformer_config.moe_z_loss_coeff": 0.1,
        "override_transformer_config.recompute_granularity": "full",
    }
    found = run(
        {
            "algorithm.adv_estimator": "gae",
            **{f"{ACTOR}.megatron.{key}": value for key, value in megatron.items()},
            "actor_rollout_ref.model.lora_rank": 8,
            "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
            "trainer.critic_warmup": 3,
        }
    )
    sections = ("trainer.parallel.", "trainer.offload.", "trainer.moe.", "trainer.lora.", "trainer.critic.")
    names = [key for key in found if key.startswith(sections)]
    assert len(names) >= 20 and found["trainer.recompute"] == "full"
