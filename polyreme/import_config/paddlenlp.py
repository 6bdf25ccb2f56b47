"""PaddleNLP: the JSON or YAML argument files of `llm/alignment/rl` (PPO, GRPO, REINFORCE++, VAPO).

Keys and defaults: paddlenlp/rl/utils/config_utils.py, and PaddleNLP's TrainingArguments.

Invariant: this module and `paddlenlp_keys` are the only places that know PaddleNLP's keys.
"""

import math
from typing import Any

from polyreme.import_config.convert import path, product, ratio, refused
from polyreme.import_config.paddlenlp_keys import CRITIC, RULES, SCHEDULES, minibatches_of, per_iteration, prompts, samples
from polyreme.import_config.rules import ITERATIONS, Fixed, System, Values

PRESETS = {"ppo": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_pp", "vapo": "ppo"}
DEFAULTS = {
    "rl_algorithm": "ppo",
    "per_device_prompt_batch_size": 16,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_prompt_len": 4096,
    "max_dec_len": 512,
    "max_length": 2048,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "kl_coeff": 0.02,
    "kl_loss_coeff": 0.001,
    "clip_range_ratio": 0.2,
    "clip_range_score": 10.0,
    "clip_range_value": 5.0,
    "num_train_epochs": 1,
    "seed": 42,
    "tensor_parallel_degree": -1,
    "rollout_tensor_parallel_degree": -1,
}


def _fixed(values: Values) -> Fixed:
    algorithm, longest = values["rl_algorithm"], values["max_prompt_len"] + values["max_dec_len"]
    if algorithm not in PRESETS:
        raise refused("rl_algorithm of an algorithm", algorithm, PRESETS)
    unknown = values.get("sharding_parallel_degree", -1) < 1
    fixed: Fixed = {
        "device": ("cuda", "the usual device"),
        "placement": ("colocated", "PaddleNLP generates on the trainer's devices"),
        "model.dtype": ("bfloat16", "bf16"),
        "groups_per_iteration": (prompts(values), "prompts per generation on all devices"),
        "group_size": (samples(values), "rollout_n, formerly num_return_sequences"),
        **_algorithm(values, algorithm),
        "algorithm.minibatches": minibatches_of(values),
        **_optimizer("trainer.optimizer", "", values),
        "rollout.max_model_len": (max(values["max_length"], longest), "max_length, at least max_prompt_len + max_dec_len"),
        "trainer.parallel.data": (
            product(values.get("sharding_parallel_degree")),
            "CHECK: sharding_parallel_degree: -1; the number of devices / (tensor x pipeline ranks)"
            if unknown
            else "sharding_parallel_degree",
        ),
        "rollout.replicas": (_replicas(values), "devices / rollout_tensor_parallel_degree"),
        "data.prompt_key": (values.get("prompt_key", "src"), "PaddleNLP's column of prompts"),
        "data.label_key": (values.get("response_key") or values.get("label_key") or "tgt", "PaddleNLP's column of labels"),
        "data.template": ("none", "its prompts are templated already (chat_template: none)"),
        "reward.rewards": _rewards(values),
    }
    if algorithm in CRITIC:
        fixed |= _optimizer("trainer.critic.optimizer", "critic_", values)
    return fixed


def _replicas(values: Values) -> int:
    sizes = [values.get(f"{name}_parallel_degree") for name in ("sharding", "tensor", "pipeline", "sep")]
    own = values["rollout_tensor_parallel_degree"]
    return ratio(product(*sizes), own if own > 0 else product(values["tensor_parallel_degree"]))


def _algorithm(values: Values, algorithm: str) -> Fixed:
    place, key = ("loss", "kl_loss_coeff") if algorithm == "grpo" else ("reward", "kl_coeff")
    low, high = (values.get(f"clip_range_ratio_{side}") or values["clip_range_ratio"] for side in ("low", "high"))
    fixed: Fixed = {
        "algorithm.preset": (PRESETS[algorithm], f"rl_algorithm: {algorithm}"),
        "algorithm.loss": (
            {"kind": "clip", "ratio": "token", "low": low, "high": high, "dual": None},
            "clip_range_ratio_low and _high, else clip_range_ratio",
        ),
        "algorithm.aggregation": ("token-mean", "the mean over tokens"),
        "algorithm.correction": ([], "PaddleNLP corrects nothing"),
        "algorithm.kl": (None, f"{key}: 0"),
    }
    if values[key]:
        kl = {"place": place, "estimator": "k3" if place == "loss" else "k1", "coef": values[key]}
        fixed["algorithm.kl"] = (kl, f"{key}: {values[key]}")
    if algorithm in CRITIC:
        fixed["algorithm.advantage.whiten"] = (bool(values.get("normalize_advantage")), "normalize_advantage")
    if algorithm == "vapo":
        why = "CHECK: as in VAPO's paper: lam 1 - 1 / (0.05 x length) for the policy, 1 for the critic"
        fixed |= {"algorithm.advantage.lam.alpha": (0.05, why), "algorithm.advantage.value_lam": (1.0, why)}
    return fixed


def _optimizer(target: str, role: str, values: Values) -> Fixed:
    """All settings of an optimizer. What a file does not set for the critic is as for the actor."""

    def of(name: str, usual: Any = None) -> Any:
        own = values.get(f"{role}{name}")
        shared = values.get(name)
        return own if own is not None else usual if shared is None else shared

    lr, style, part = of("learning_rate"), of("lr_scheduler_type"), of("warmup_ratio", 0)
    steps, iterations = of("warmup_steps", 0), values.get(ITERATIONS, 0)
    warmup = math.ceil(steps / per_iteration(values)) if steps and steps > 0 else math.ceil((part or 0) * iterations)
    found = {
        "lr": (lr, "learning_rate"),
        "min_lr": (min(of("min_learning_rate", 0.0), lr), "min_learning_rate, not above learning_rate"),
        "schedule": (SCHEDULES.get(style, "constant"), f"lr_scheduler_type: {style}"),
        "warmup": (warmup, f"warmup_steps / optimizer steps per iteration, or warmup_ratio x {iterations} iterations"),
        "weight_decay": (of("weight_decay", 0.0), "weight_decay"),
        "beta1": (of("adam_beta1", 0.9), "adam_beta1"),
        "beta2": (of("adam_beta2", 0.999), "adam_beta2"),
        "eps": (of("adam_epsilon", 1e-8), "adam_epsilon"),
        "clip_grad": (of("max_grad_norm", 1.0), "max_grad_norm"),
    }
    return {f"{target}.{name}": (value, f"{role}{why}" if role else why) for name, (value, why) in found.items()}


def _rewards(values: Values) -> tuple[object, str]:
    if values.get("use_rm_server") and values.get("reward_server"):
        return [{"url": values["reward_server"], "protocol": "paddlenlp"}], "use_rm_server, reward_server"
    if values.get("reward_model_name_or_path") and not values.get("use_rule_reward"):
        where = path(values["reward_model_name_or_path"], values)
        return [{"model": where}], "CHECK: reward_model_name_or_path, a local path or a name of the hub"
    return [{"name": "numeric"}], "CHECK: its rule compares the last number"


PADDLENLP = System("paddlenlp", "PaddleNLP", RULES, DEFAULTS, _fixed, epochs="num_train_epochs")
