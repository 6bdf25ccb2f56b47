"""What verl trains is what the imported run trains: worked out by hand from verl's documentation and formulas."""

import math
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme.import_config.rules import Fate
from support.imports import import_text, lost_keys, mathematics

GRPO = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.name": "vllm",
    "trainer.total_training_steps": 100,
}
CLIP = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0, "ratio": "token"}
NORM = {"kind": "group_norm", "std_floor": 1e-6, "ddof": 1}


def script(values: dict[str, Any]) -> str:
    """The command line with these values."""
    return "python3 -m verl.trainer.main_ppo \\\n" + " \\\n".join(f"    '{key}={value}'" for key, value in values.items()) + "\n"


def trained(values: dict[str, Any], rows: int | None = None) -> dict[str, Any]:
    return mathematics(import_text(script(values), rows=rows, suffix=".sh")[1])


def lost(values: dict[str, Any]) -> list[str]:
    return lost_keys(import_text(script({**GRPO, **values}), suffix=".sh")[0])


def test_grpo() -> None:
    assert trained(GRPO) == {
        "advantage": NORM,
        "loss": CLIP,
        "aggregation": "token-mean",
        "kl": None,
        "rates": [1e-6] * 5,
        "critic rates": None,
        "batch": (512, 8, 4, 1),
        "ranks": ("tensor 1 x data 8", 4, 2),
    }


def test_dapo_with_a_warm_up_and_sequence_parallel_ranks() -> None:
    """recipe/dapo for 32B, on 16 machines: 128 devices, 8 of which share a sequence."""
    found, run = import_text(
        script(
            GRPO
            | {
                "data.train_batch_size": 512,
                "data.max_prompt_length": 2048,
                "data.max_response_length": 20480,
                "data.truncation": "left",
                "data.gen_batch_size": 1536,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
                "actor_rollout_ref.rollout.n": 16,
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
                "actor_rollout_ref.actor.clip_ratio_low": 0.2,
                "actor_rollout_ref.actor.clip_ratio_high": 0.28,
                "actor_rollout_ref.actor.clip_ratio_c": 10.0,
                "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
                "actor_rollout_ref.actor.optim.weight_decay": 0.1,
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 8,
                "algorithm.filter_groups.enable": True,
                "algorithm.filter_groups.metric": "acc",
                "algorithm.kl_ctrl.kl_coef": 0.0,
                "reward_model.reward_manager": "dapo",
                "reward_model.overlong_buffer.enable": True,
                "reward_model.overlong_buffer.len": 4096,
                "reward_model.overlong_buffer.penalty_factor": 1.0,
                "trainer.nnodes": 16,
            }
        ),
        suffix=".sh",
    )
    assert mathematics(run) == {
        "advantage": NORM,
        "loss": CLIP | {"high": 0.28, "dual": 10.0},
        "aggregation": "token-mean",
        "kl": None,
        "rates": pytest.approx([1e-7, 2e-7, 1e-6, 1e-6, 1e-6]),
        "critic rates": None,
        "batch": (512, 16, 16, 1),
        "ranks": ("tensor 1 x context 8 x data 16", 32, 4),
    }
    assert run.algorithm.dynamic_sampling and run.algorithm.shaping.overlong is not None
    assert (run.algorithm.shaping.overlong.buffer, run.algorithm.shaping.overlong.factor) == (0.2, 1.0)
    assert run.trainer.optimizer.weight_decay == 0.1 and run.algorithm.correction == ()
    assert lost_keys(found) == ["data.truncation"]  # verl cuts the left of long prompts


def test_ppo_on_megatron_with_warm_ups_of_both_models() -> None:
    """8 devices in tensor 2 x pipeline 2: 2 data ranks. 15 passes of 7473 // 1024 = 7 steps; warm-ups are parts of 105, rounded down."""
    values = {
        "algorithm.adv_estimator": "gae",
        "model_engine": "megatron",
        "data.train_batch_size": 1024,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1,
        "actor_rollout_ref.actor.optim.lr_decay_style": "linear",
        "actor_rollout_ref.actor.optim.min_lr": 1e-7,
        "critic.optim.lr": 1e-5,
        "critic.optim.lr_warmup_steps_ratio": 0.05,
        "critic.optim.lr_scheduler_type": "cosine",
        "critic.optim.min_lr_ratio": 0.1,
        "critic.cliprange_value": 0.5,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
        "trainer.total_epochs": 15,
    }
    linear = [1e-7 + 9e-7 * (1 - (i - 11) / 95) for i in (52, 104, 105)]
    cosine = [1e-6 + 9e-6 * (1 + math.cos(math.pi * (i - 6) / 100)) / 2 for i in (52, 104, 105)]
    assert trained(values, rows=7473) == {
        "advantage": {
            "kind": "gae",
            "gamma": 1.0,
            "lam": 1.0,
            "value_lam": None,
            "bootstrap_truncated": False,
            "whiten": True,
            "value_clip": 0.5,
        },
        "loss": CLIP,
        "aggregation": "token-mean",
        "kl": None,
        "rates": pytest.approx([1e-7, 2e-7, *linear]),
        "critic rates": pytest.approx([2e-6, 4e-6, *cosine]),
        "batch": (1024, 1, 4, 1),
        "ranks": ("tensor 2 x pipeline 2 x data 2", 4, 2),
    }


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("values", "preset", "loss", "aggregation"),
    [
        (
            {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10, f"{ACTOR}.clip_ratio_high": 0.2},
            "cispo",
            {"kind": "cispo", "low": 1.0, "high": 0.2},  # a ratio is never below 0 = 1 - 1
            "token-mean",
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.2, f"{ACTOR}.loss_agg_mode": "token-mean"},
            "sapo",
            {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.2},
            "seq-mean-token-mean",
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "geo_mean", f"{ACTOR}.clip_ratio_low": 0.4, f"{ACTOR}.clip_ratio_high": 0.4},
            "grpo",
            {"kind": "geometric_mean", "low": 0.4, "high": 0.4},
            "seq-mean-token-mean",
        ),
        (
            {
                f"{ACTOR}.policy_loss.loss_mode": "gspo",
                f"{ACTOR}.clip_ratio_low": 0.0003,
                f"{ACTOR}.clip_ratio_high": 0.0004,
                f"{ACTOR}.clip_ratio_c": 10.0,
            },
            "gspo",
            {"kind": "clip", "low": 0.0003, "high": 0.0004, "dual": None, "ratio": "sequence"},
            "seq-mean-token-mean",
        ),
        (
            {
                f"{ACTOR}.policy_loss.loss_mode": "dppo_tv",
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{ACTOR}.clip_ratio_low": 0.15,
                f"{ACTOR}.clip_ratio_high": 0.15,
                f"{ACTOR}.clip_ratio_c": 10000.0,
                "algorithm.rollout_correction.bypass_mode": True,
            },
            "dppo_tv",
            {"kind": "tv_mask", "low": 0.15, "high": 0.15, "cap": 10000.0},
            "seq-mean-token-sum-norm",
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gpg", f"{ACTOR}.ppo_mini_batch_size": 512},
            "grpo",
            {"kind": "policy_gradient"},
            "token-mean",
        ),
    ],
)
def test_losses_keep_their_kind_and_units(values: dict[str, Any], preset: str, loss: dict[str, Any], aggregation: str) -> None:
    _, run = import_text(script(GRPO | values), suffix=".sh")
    assert (run.algorithm.preset, run.algorithm.loss.model_dump(), run.algorithm.aggregation) == (preset, loss, aggregation)
    assert run.algorithm.anchor == ("behaviour" if preset == "dppo_tv" else "old")


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [
        ("rloo", "leave_one_out"),
        ("rloo_vectorized", "leave_one_out"),
        ("grpo_vectorized", "group_norm"),
        ("reinforce_plus_plus_baseline", "group_mean"),
        ("opo", "length_weighted_baseline"),
        ("remax", "greedy_baseline"),
    ],
)
def test_estimators(estimator: str, kind: str) -> None:
    """All of them with verl's loss, which clips, whatever the preset of the same name does here."""
    found = trained(GRPO | {"algorithm.adv_estimator": estimator})
    assert (found["advantage"]["kind"], found["loss"], found["aggregation"]) == (kind, CLIP, "token-mean")


def test_dr_grpo() -> None:
    values = {"algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
    found = trained(GRPO | values)
    assert (found["advantage"], found["aggregation"]) == ({"kind": "group_mean", "whiten": False}, "seq-mean-token-sum-norm")
    assert lost(values | {f"{ACTOR}.loss_scale_factor": 1000}) == [f"{ACTOR}.loss_scale_factor"]


def test_reinforce_pp_discounts_and_adapts_its_kl_per_token() -> None:
    found = trained(
        GRPO
        | {
            "algorithm.adv_estimator": "reinforce_plus_plus",
            "algorithm.gamma": 0.99,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "low_var_kl",
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.kl_coef": 0.01,
            "algorithm.kl_ctrl.target_kl": 0.05,
            "algorithm.kl_ctrl.horizon": 5000,
        }
    )
    assert found["advantage"] == {"kind": "returns", "gamma": 0.99, "whiten": True}
    adaptive = {"target": 0.05, "horizon": 5000, "unit": "token"}
    assert found["kl"] == {"place": "reward", "estimator": "k3", "coef": 0.01, "adaptive": adaptive}


def test_the_kl_has_one_place() -> None:
    both = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k3+", "algorithm.use_kl_in_reward": True}
    assert lost(both) == ["algorithm.use_kl_in_reward"]
    assert trained(GRPO | both)["kl"] == {"place": "loss", "estimator": "k3+", "coef": 0.001}


@pytest.mark.parametrize(
    ("values", "correction"),
    [
        ({}, []),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0}, [{"kind": "token_tis", "cap": 3.0}]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, [{"kind": "icepop", "low": 0.5, "high": 5.0}]),
        (
            {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
            [{"kind": "sequence_tis", "cap": 2.0}, {"kind": "geometric_mask", "low": 0.99, "high": 1.01}],
        ),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.25}, [{"kind": "geometric_mask", "low": 0.8, "high": 1.25}]),
        ({"rollout_token_veto_threshold": 1e-4}, [{"kind": "veto", "low": 1e-4, "high": None}]),
    ],
)
def test_corrections(values: dict[str, Any], correction: list[dict[str, Any]]) -> None:
    given = {f"algorithm.rollout_correction.{key}": value for key, value in values.items()}
    _, run = import_text(script(GRPO | given), suffix=".sh")
    assert run.algorithm.correction != "auto"
    assert [each.model_dump() for each in run.algorithm.correction] == correction


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm.adv_estimator": "gpg"},
        {"algorithm.adv_estimator": "grpo_passk"},
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        {"algorithm.adv_estimator": "mine"},
        {f"{ACTOR}.policy_loss.loss_mode": "clip_cov"},
        {f"{ACTOR}.policy_loss.loss_mode": "kl_cov"},
        {f"{ACTOR}.policy_loss.loss_mode": "dppo_kl"},
        {f"{ACTOR}.policy_loss.loss_mode": "up"},
        {f"{ACTOR}.loss_agg_mode": "token-sum"},
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"},
        {"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "forward_kl_topk"},
    ],
)
def test_another_algorithm_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(list(values.values())[-1])):
        import_text(script(GRPO | values), suffix=".sh")


@pytest.mark.parametrize(
    "values",
    [
        {"actor_rollout_ref.rollout.multi_turn.enable": True},
        {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 2},
        {"actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml"},
        {"data.tool_config_path": "tools.yaml"},
        {"actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent"},
        {"actor_rollout_ref.rollout.agent.agent_loop_config_path": "agents.yaml"},
    ],
)
def test_several_turns_are_said_first(values: dict[str, Any]) -> None:
    found, _ = import_text(script({**GRPO, "algorithm.unheard_of": 1, **values}), suffix=".sh")
    assert found.lost[0].fate is Fate.ANOTHER_RUN and found.lost[0].key in values
    assert found.lost[1].key == "algorithm.unheard_of"


@pytest.mark.parametrize(
    ("key", "harmless", "harmful"),
    [
        ("actor_rollout_ref.rollout.top_p", 1.0, 0.95),
        ("actor_rollout_ref.rollout.top_k", -1, 50),
        ("actor_rollout_ref.rollout.do_sample", True, False),
        ("actor_rollout_ref.rollout.quantization", "null", "fp8"),
        (f"{ACTOR}.shuffle", False, True),
        (f"{ACTOR}.optim.optimizer", "AdamW", "SGD"),
        (f"{ACTOR}.optim.lr_scheduler_type", "constant", "wsd"),
        (f"{ACTOR}.fsdp_config.model_dtype", "fp32", "bf16"),
        (f"{ACTOR}.qat.enable", False, True),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.0, 0.1),
        ("actor_rollout_ref.model.exclude_modules", "null", ".*visual.*"),
        ("actor_rollout_ref.ref.model.path", "null", "other"),
        ("data.custom_cls.path", "null", "mine.py"),
        ("data.train_max_samples", -1, 1000),
        ("data.reward_fn_key", "data_source", "kind"),
        ("algorithm.use_pf_ppo", False, True),
        ("algorithm.rollout_correction.rollout_rs", "null", "token_k1"),
        ("reward_model.reward_manager", "naive", "batch"),
        ("reward_model.sandbox_fusion.url", "null", "http://sandbox"),
        ("trainer.val_only", False, True),
        ("config-name", "ppo_megatron_trainer.yaml", "search_multiturn_grpo"),
    ],
)
def test_a_key_is_lost_only_where_its_value_changes_training(key: str, harmless: Any, harmful: Any) -> None:
    def reported(value: Any) -> list[str]:
        text = script(GRPO | ({} if key == "config-name" else {key: value}))
        text = text.replace("main_ppo", f"main_ppo --config-name={value}") if key == "config-name" else text
        return lost_keys(import_text(text, suffix=".sh")[0])

    assert reported(harmless) == [] and reported(harmful) == [key]


def test_critic_keys_without_a_critic_change_nothing() -> None:
    assert lost({"critic.optim.optimizer": "SGD", "critic.ppo_epochs": 4, "critic.model.lora_rank": 8}) == []
    adapted = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.model.lora_rank": 8}
    assert lost(adapted) == ["critic.model.lora_rank"] and lost({**adapted, "critic.model.lora_rank": 8}) == []
    assert lost({"algorithm.adv_estimator": "gae", "critic.optim.optimizer": "SGD", "critic.ppo_epochs": 4}) == [
        "critic.optim.optimizer",
        "critic.ppo_epochs",
    ]


def test_rewards() -> None:
    def rewards(values: dict[str, Any]) -> list[dict[str, Any]]:
        _, run = import_text(script(GRPO | values), suffix=".sh")
        assert run.reward is not None
        return [reward.model_dump(exclude_defaults=True, mode="json") for reward in run.reward.rewards]

    assert rewards({}) == [{"name": "math"}]
    assert rewards({"reward_model.enable": True, "reward_model.model.path": "/models/rm"}) == [{"model": "/models/rm"}]
    newer = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "/models/rm"}
    assert rewards(newer) == [{"model": "/models/rm"}]
    own = {
        "reward.custom_reward_function.path": "/mine.py",
        "reward.custom_reward_function.name": "score",
        "reward.custom_reward_function.reward_kwargs.strict": True,
    }
    assert rewards(own) == [{"file": "/mine.py", "function": "score", "options": {"strict": True}}]
    assert lost(own | newer) == ["reward_model.enable"]  # the function asks a generative model
    gdpo = rewards(
        {
            "algorithm.adv_estimator": "gdpo",
            "algorithm.gdpo_reward_keys": '["accuracy_reward", "format_reward"]',
            "algorithm.gdpo_reward_weights": "[1.0, 0.5]",
        }
    )
    assert [(reward["name"], reward.get("weight", 1.0)) for reward in gdpo] == [("accuracy_reward", 1.0), ("format_reward", 0.5)]
    assert all("FILL_IN" in reward["file"] for reward in gdpo)


def test_distillation_by_policy_gradient() -> None:
    loss = "distillation.distillation_loss"
    _, run = import_text(
        script(
            GRPO
            | {
                "distillation.enabled": True,
                f"{loss}.loss_mode": "k1",
                f"{loss}.use_policy_gradient": True,
                f"{loss}.use_task_rewards": False,
                f"{loss}.distillation_loss_coef": 0.5,
            }
        ),
        suffix=".sh",
    )
    assert (run.algorithm.preset, run.algorithm.advantage.kind, run.algorithm.teacher_coef) == ("distillation", "zero", 0.5)


def test_the_fully_asynchronous_trainer() -> None:
    """An iteration lasts from one version to the next: 4 mini-batches of 32 prompts."""
    found, run = import_text(
        script(
            GRPO
            | {
                "data.train_batch_size": 0,
                "data.gen_batch_size": 1,
                "actor_rollout_ref.hybrid_engine": False,
                "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
                "async_training.staleness_threshold": 0.5,
                "async_training.trigger_parameter_sync_step": 4,
                "async_training.require_batches": 1,
                "rollout.total_rollout_steps": 51200,
                "rollout.nnodes": 2,
                "rollout.n_gpus_per_node": 8,
                "trainer.total_training_steps": "null",
            }
        ),
        suffix=".sh",
    )
    assert (run.groups_per_iteration, run.algorithm.minibatches, run.iterations) == (128, 4, 400)
    assert (run.placement, run.max_staleness, run.rollout.replicas) == ("separate", 1, 8)
    assert "CHECK" in found.comments["max_staleness"]


def test_a_mini_batch_that_does_not_divide_the_batch_is_a_check() -> None:
    found, _ = import_text(script(GRPO | {"data.train_batch_size": 500}), suffix=".sh")
    assert "CHECK: 500 / 128" in found.comments["algorithm.minibatches"]


def test_pipeline_stages_over_machines_are_a_check() -> None:
    values = {"trainer.nnodes": 4, f"{ACTOR}.megatron.tensor_model_parallel_size": 4}
    found, run = import_text(script(GRPO | values | {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}), suffix=".sh")
    assert run.trainer.parallel.layout == "tensor 4 x data 8" and "CHECK" in found.comments["trainer.parallel.pipeline"]


@pytest.mark.parametrize(
    "path", ["Qwen/Qwen2.5-VL-7B-Instruct", "OpenGVLab/InternVL3-2B", "zai-org/GLM-4.1V-9B", "openbmb/MiniCPM-o-2_6"]
)
def test_a_model_of_images_is_another_kind_of_run(path: str) -> None:
    found, _ = import_text(script(GRPO | {"actor_rollout_ref.model.path": path}), suffix=".sh")
    assert (found.lost[0].key, found.lost[0].fate) == ("data.image_key", Fate.ANOTHER_RUN)
    assert lost({"actor_rollout_ref.model.path": "Qwen/Qwen3-8B", "data.image_key": "images"}) == []


def test_a_text_for_a_number_is_an_error_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_batch_size"):
        import_text("algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: many}\n", "verl")
    with pytest.raises(ConfigError, match="fit together"):
        import_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: null}}\n", "verl")
