"""What MindSpeed RL trains is what the imported run trains."""

import math
from typing import Any

import pytest
import yaml

from polyreme.errors import ConfigError
from polyreme.import_config.rules import Fate
from support.imports import import_text, lost_keys, mathematics

TRAIN, ACTOR, CRITIC, RL, GENERATE = "megatron_training", "actor_config", "critic_config", "rl_config", "generate_config"
SAMPLING = {"max_tokens": 2048, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 1.0}
GRPO: dict[str, dict[str, Any]] = {
    TRAIN: {
        "tokenizer_name_or_path": "./m",
        "data_path": "./d",
        "global_batch_size": 64,
        "train_iters": 100,
        "stage": "ray_grpo",
    },
    ACTOR: {"lr": 1e-6, "lr_decay_style": "constant", "tensor_model_parallel_size": 4},
    RL: {
        "adv_estimator": "group_norm",
        "mini_batch_size": 16,
        "n_samples_per_prompt": 8,
        "init_kl_coef": 0.001,
        "kl_penalty": "low_var_kl",
        "max_prompt_length": 1024,
        "verifier_function": ["math_17k_acc"],
        "actor_resource": {"num_npus": 16},
    },
    GENERATE: {"infer_tensor_parallel_size": 4, "sampling_config": SAMPLING},
}
CLIP = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"}


def text(**sections: dict[str, Any]) -> str:
    return yaml.safe_dump({**GRPO, **{name: {**GRPO.get(name, {}), **values} for name, values in sections.items()}})


def test_grpo() -> None:
    found, run = import_text(text())
    assert lost_keys(found) == [] and run.algorithm.entropy_coef == 0.001  # MindSpeed RL's default
    assert mathematics(run) == {
        "advantage": {"kind": "group_norm", "std_floor": 1e-8, "ddof": 1},
        "loss": CLIP,
        "aggregation": "token-mean",
        "kl": {"place": "loss", "estimator": "k3", "coef": 0.001},
        "rates": [1e-6] * 5,
        "critic rates": None,
        "batch": (64, 8, 4, 1),
        "ranks": ("tensor 4 x data 4", 4, 4),
    }


def test_ppo_with_schedules_of_both_models_and_inherited_keys() -> None:
    """Megatron's default schedule is linear. A warm-up is a part of train_iters; a shared key of Megatron is that of both models."""
    actor = {"lr": 1e-6, "lr_decay_style": "cosine", "min_lr": 1e-7, "lr_warmup_fraction": 0.1, "tensor_model_parallel_size": 8}
    found, run = import_text(
        text(
            megatron_training={"stage": "ray_ppo", "weight_decay": 0.05},
            actor_config=actor,
            critic_config={"lr": 5e-6, "weight_decay": 0.0, "load": "./ckpt"},
            rl_config={"adv_estimator": "gae", "lam": 1.0, "cliprange_value": 0.5, "init_kl_coef": 0.0, "mini_batch_size": 64},
        )
    )
    cosine = [1e-7 + 9e-7 * (1 + math.cos(math.pi * (i - 11) / 90)) / 2 for i in (50, 99, 100)]
    linear = [5e-6 * (1 - (i - 1) / 100) for i in (1, 2, 50, 99, 100)]
    found_ = mathematics(run)
    assert found_["rates"] == pytest.approx([1e-7, 2e-7, *cosine]) and found_["critic rates"] == pytest.approx(linear)
    assert run.trainer.critic.optimizer is not None
    assert (run.trainer.optimizer.weight_decay, run.trainer.critic.optimizer.weight_decay) == (0.05, 0.0)
    assert (found_["advantage"]["lam"], found_["advantage"]["whiten"], found_["kl"]) == (1.0, True, None)
    assert found_["ranks"] == ("tensor 8 x data 2", 4, 4)
    assert lost_keys(found) == ["critic_config.load"]


def test_dapo_with_filtered_groups_and_experts() -> None:
    found, run = import_text(
        text(
            megatron_training={"stage": "ray_dapo", "global_batch_size": 96},
            actor_config={"expert_model_parallel_size": 2, "moe_tp_extend_ep": True},
            rl_config={
                "token_level_loss": False,
                "clip_higher_enable": True,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "overlong_buffer_enable": True,
                "overlong_buffer": 512,
                "rollout_max_tokens": 2048,
                "overlong_buffer_penalty_factor": 0.1,
                "filter_groups_enable": True,
                "filter_groups_train_batch_size": 32,
                "verifier_function": ["acc_for_dapo"],
            },
        )
    )
    assert lost_keys(found) == []
    trained = mathematics(run)
    assert (trained["loss"]["high"], trained["aggregation"], trained["kl"]) == (0.28, "seq-mean-token-mean", None)
    assert trained["batch"] == (32, 8, 2, 1)  # prompts after filtering
    assert trained["ranks"][0] == "tensor 4 x data 4 (expert 8) (expert tensor 1)"  # tensor ranks extend the expert ranks
    assert run.algorithm.dynamic_sampling and run.algorithm.shaping.overlong is not None
    assert (run.algorithm.shaping.overlong.buffer, run.algorithm.shaping.overlong.factor) == (0.25, 0.1)


def test_several_turns_are_said_first() -> None:
    found, _ = import_text(text(rl_config={"multi_turn_enable": True, "tool_config_path": "t.yaml", "unheard": 1}))
    assert [entry.fate for entry in found.lost] == [Fate.ANOTHER_RUN, Fate.UNKNOWN, Fate.LOST]
    assert found.lost[-1].key == "reward.rewards"


def test_offload_adapters_and_sampling() -> None:
    found, run = import_text(
        text(
            megatron_training={"lora_r": 128, "lora_alpha": 64},
            generate_config={
                "offload_train_optimizer": True,
                "offload_train_param": True,
                "sampling_config": {**SAMPLING, "top_k": 50, "min_p": 0.01},
            },
        )
    )
    assert run.trainer.offload.optimizer and run.trainer.offload.idle_models
    assert run.trainer.lora is not None and (run.trainer.lora.rank, run.trainer.lora.alpha) == (128, 64)
    assert lost_keys(found) == ["generate_config.sampling_config.top_k", "generate_config.sampling_config.min_p"]


def test_defaults_of_sampling_are_reported() -> None:
    """Without sampling keys, MindSpeed RL draws from the 50 likeliest tokens at temperature 0.2."""
    found, run = import_text(text(generate_config={"sampling_config": {"max_tokens": 2048}}))
    assert run.rollout.temperature == 0.2 and lost_keys(found) == ["generate_config.sampling_config.top_k"]
    assert "default" in found.lost[0].note


def test_a_penalty_of_sampling_is_lost_unless_it_is_neutral() -> None:
    penalties = {"top_k": -1, "repetition_penalty": 1, "presence_penalty": 1, "frequency_penalty": 0}
    found, _ = import_text(text(generate_config={"sampling_config": penalties}))
    assert lost_keys(found) == ["generate_config.sampling_config.presence_penalty"]


def test_every_verifier_is_a_reward_or_a_file_to_be_written() -> None:
    found, run = import_text(
        text(rl_config={"verifier_function": ["acc", "strict_format", "step"], "verifier_weight": [1.0, 0.5, 0.2]})
    )
    assert run.reward is not None
    assert [(reward.label, reward.weight) for reward in run.reward.rewards] == [
        ("math", 1.0),
        ("think_format", 0.5),
        ("step", 0.2),
    ]
    assert str(run.reward.rewards[2].file).endswith("FILL_IN/step.py")
    assert "CHECK" in found.comments["reward.rewards"] and "step" in found.comments["reward.rewards"]
    _, run = import_text(text(rl_config={"rule_reward": False}))
    assert run.reward is not None and run.reward.rewards[0].model is not None


def test_kl_in_the_loss_without_a_gradient_is_lost() -> None:
    found, run = import_text(text(rl_config={"kl_penalty": "kl"}))
    assert lost_keys(found) == ["rl_config.kl_penalty"] and run.algorithm.kl is None


@pytest.mark.parametrize(("section", "key"), [(TRAIN, "stage"), (RL, "adv_estimator"), (RL, "kl_penalty")])
def test_another_algorithm_is_refused(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match="unheard"):
        import_text(text(**{section: {key: "unheard"}}))
