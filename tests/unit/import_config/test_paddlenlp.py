"""What PaddleNLP trains is what the imported run trains."""

import json
import math
from typing import Any

import pytest

from polyreme.errors import ConfigError
from support.imports import import_text, lost_keys, mathematics

GRPO: dict[str, Any] = {
    "rl_algorithm": "grpo",
    "actor_model_name_or_path": "m",
    "train_datasets": "d",
    "use_rm_server": True,
    "reward_server": "http://127.0.0.1:8731",
    "max_prompt_len": 512,
    "max_dec_len": 4096,
    "max_length": 4608,
    "global_batch_size": 64,
    "global_mini_batch_size": 16,
    "rollout_n": 8,
    "update_iters": 1,
    "max_steps": 400,  # 4 an iteration
    "learning_rate": 5e-7,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "tensor_parallel_degree": 2,
    "sharding_parallel_degree": 4,
}
CLIP = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"}


def imported(**values: Any) -> Any:
    return import_text(json.dumps({**GRPO, **values}), "paddlenlp", suffix=".json")


def test_grpo() -> None:
    found, run = imported()
    assert lost_keys(found) == []
    assert mathematics(run) == {
        "advantage": {"kind": "group_norm", "std_floor": 1e-6, "ddof": 1},
        "loss": CLIP,
        "aggregation": "token-mean",
        "kl": {"place": "loss", "estimator": "k3", "coef": 0.001},
        "rates": [5e-7] * 5,
        "critic rates": None,
        "batch": (64, 8, 4, 1),
        "ranks": ("tensor 2 x data 4", 4, 2),
    }
    assert run.algorithm.shaping.clip == (-10.0, 10.0) and run.algorithm.correction == ()


def test_ppo_with_schedules_of_both_models() -> None:
    """The critic has what it sets, and the actor's values elsewhere. PaddleNLP's default schedule is linear."""
    _, run = imported(
        rl_algorithm="ppo",
        rollout_n=1,
        lr_scheduler_type="cosine",
        min_learning_rate=1e-7,
        warmup_ratio=0.05,
        critic_learning_rate=1e-5,
        critic_lr_scheduler_type="linear",
        critic_warmup_ratio=0.1,
        critic_min_learning_rate=1e-6,
        kl_coeff=0.02,
        clip_range_value=5.0,
        normalize_advantage=True,
        pretrain_critic_steps=10,
    )
    trained = mathematics(run)
    cosine = [1e-7 + 4e-7 * (1 + math.cos(math.pi * (i - 6) / 95)) / 2 for i in (50, 99, 100)]
    linear = [1e-6 + 9e-6 * (1 - (i - 11) / 90) for i in (50, 99, 100)]
    assert trained["rates"] == pytest.approx([1e-7, 2e-7, *cosine])
    assert trained["critic rates"] == pytest.approx([1e-6, 2e-6, *linear])
    assert trained["kl"] == {"place": "reward", "estimator": "k1", "coef": 0.02}
    assert (trained["advantage"]["value_clip"], trained["advantage"]["whiten"]) == (5.0, True)
    assert run.trainer.critic.optimizer is not None and run.trainer.critic.optimizer.weight_decay == 0.01
    assert run.trainer.critic.warmup_iterations == 10


def test_the_default_schedule_and_advantages() -> None:
    values = {key: value for key, value in GRPO.items() if key != "lr_scheduler_type"} | {"rl_algorithm": "ppo", "rollout_n": 1}
    _, run = import_text(json.dumps(values), "paddlenlp", suffix=".json")
    assert mathematics(run)["rates"] == pytest.approx([5e-7 * (1 - (i - 1) / 100) for i in (1, 2, 50, 99, 100)])
    assert mathematics(run)["advantage"]["whiten"] is False  # normalize_advantage is off


def test_vapo_and_reinforce_pp() -> None:
    found, run = imported(rl_algorithm="vapo")
    advantage = mathematics(run)["advantage"]
    assert (advantage["lam"], advantage["value_lam"]) == ({"alpha": 0.05}, 1.0)
    assert "CHECK" in found.comments["algorithm.advantage.value_lam"]
    _, run = imported(rl_algorithm="reinforce_plus_plus", kl_coeff=0.001)
    assert mathematics(run)["advantage"] == {"kind": "returns", "gamma": 1.0, "whiten": True}
    assert mathematics(run)["kl"] == {"place": "reward", "estimator": "k1", "coef": 0.001}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_dec_len", 32),
        ("top_p", 0.9),
        ("repetition_penalty", 1.1),
        ("pg_loss_coeff", 2.0),
        ("ptx_coeff", 0.1),
        ("hidden_dropout_prob", 0.1),
        ("fp16", True),
        ("rollout_quant_type", "weight_only_int8"),
        ("chat_template", "qwen"),
        ("unheard", 1),
    ],
)
def test_what_is_lost_is_said(key: str, value: Any) -> None:
    found, _ = imported(**{key: value})
    assert lost_keys(found) == [key]


def test_what_must_be_decided() -> None:
    found, run = imported(sharding_parallel_degree=-1, offload_level="freeze_model optimizer", rollout_tensor_parallel_degree=-1)
    assert "CHECK" in found.comments["trainer.parallel.data"] and "CHECK" in found.comments["data.max_prompt_tokens"]
    assert run.trainer.offload.optimizer and run.trainer.offload.idle_models and run.rollout.tensor_parallel == 2


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="unheard"):
        imported(rl_algorithm="unheard")


def test_steps_are_optimizer_steps() -> None:
    """64 prompts in mini-batches of 16, twice: 8 steps an iteration. The iteration with step 100 is the 13th."""
    _, run = imported(update_iters=2, max_steps=100, save_steps=40, eval_steps=4, warmup_steps=20)
    assert (run.iterations, run.trainer.save_interval, run.eval_interval, run.trainer.optimizer.warmup) == (13, 5, 1, 3)


def test_options_that_its_training_does_not_have() -> None:
    """Its trainer has a discount of 1 and a lambda of 0.95, which no option changes."""
    ppo = {"rl_algorithm": "ppo", "rollout_n": 1}
    found, run = imported(**ppo, gamma=1.0, gae_lambda=0.95, rollout_input_batch_size=4)
    assert lost_keys(found) == [] and (run.algorithm.advantage.gamma, run.algorithm.advantage.lam) == (1.0, 0.95)
    found, run = imported(**ppo, gamma=0.99, gae_lambda=0.9)
    assert lost_keys(found) == ["gamma", "gae_lambda"] and (run.algorithm.advantage.gamma, run.algorithm.advantage.lam) == (
        1.0,
        0.95,
    )
