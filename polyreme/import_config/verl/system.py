"""verl: hydra's YAML, or the command line of `verl.trainer.main_ppo`.

Keys and defaults: verl/trainer/config/ppo_trainer.yaml, ppo_megatron_trainer.yaml and the files that they include.

Invariant: this folder is the only place that knows verl's keys.
"""

import math

from polyreme.import_config.convert import minibatches, path, placeholder, product, ratio
from polyreme.import_config.rules import Fixed, Lost, System, Unresolved, Values
from polyreme.import_config.verl.actor_keys import MODEL, ROLLOUT
from polyreme.import_config.verl.algorithm import ACTOR, MODE, algorithm
from polyreme.import_config.verl.engine_keys import sizes_of
from polyreme.import_config.verl.keys import RULES
from polyreme.import_config.verl.optimizer import optimizer
from polyreme.import_config.verl.turns import environment

DEFAULTS = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.image_key": "images",
    f"{MODEL}.path": "~/models/deepseek-llm-7b-chat",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "critic.model.lora_rank": 0,
    "critic.model.lora.rank": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.device": "cuda",
}
RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.": "reward_model.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "custom_reward_function.overlong_buffer.": "reward_model.overlong_buffer.",
    "reward_model.model_path": "reward_model.model.path",
    "config_name": "config-name",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "reward.num_workers": "reward_model.num_workers",
    "reward_manager.name": "reward_model.reward_manager",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
}
"""Beginnings of keys by the newer names, with the older ones."""


def with_older_names(values: Values) -> dict[str, object]:
    """The values under the names of the rules. A newer name that is null leaves an older one."""
    found: dict[str, object] = {}
    for key, value in values.items():
        for new, old in RENAMED.items():
            key = old + key.removeprefix(new) if key.startswith(new) else key  # several may apply, one after the other
        if value is not None or key not in found:
            found[key] = value
    return found


def _fixed(values: Values) -> Fixed:
    prompt, response = values["data.max_prompt_length"], values["data.max_response_length"]
    separate = values.get("actor_rollout_ref.hybrid_engine") is False or bool(values.get(f"{ROLLOUT}.nnodes"))
    mini = values[f"{ACTOR}.ppo_mini_batch_size"]
    origin = f"{ACTOR}.ppo_mini_batch_size: {mini}; data.train_batch_size / ppo_mini_batch_size, both in prompts"
    steps = minibatches(values["data.train_batch_size"] or mini, mini, origin)
    overlong = "filter" if values["data.filter_overlong_prompts"] or values["data.truncation"] != "error" else "error"
    fixed: Fixed = {
        "placement": ("colocated", "verl generates on the trainer's devices"),
        "data.overlong": (overlong, "filter_overlong_prompts: filter; else truncation: error"),
        "data.label_key": ("reward_model.ground_truth", "verl's column of reference answers"),
        "rollout.max_model_len": (
            max(prompt + response, values.get(f"{ROLLOUT}.max_model_len") or 0),
            "max_model_len, at least max_prompt_length + max_response_length",
        ),
        "rollout.replicas": (_replicas(values), "devices of generation / rollout.tensor_model_parallel_size"),
        "model.dtype": ("bfloat16", "verl's mixed precision"),
        **_ranks(values),
        **algorithm(values),
        "algorithm.minibatches": steps,
        **optimizer(ACTOR, "trainer.optimizer", values),
        "reward.rewards": _rewards(values),
    }
    if separate:
        fixed["placement"] = ("separate", "hybrid_engine: false, or rollout.nnodes")
        fixed["max_staleness"] = (1, "CHECK: verl's generation is ahead of training")
        fixed |= _asynchronous(values)
    elif values.get(MODE) == "colocate_async" and values.get("trainer.use_v1", True):
        fixed["lost mode"] = (Lost("long responses are not continued with newer weights: samples are on-policy here"), MODE)
    if values["algorithm.adv_estimator"] == "gae":
        fixed |= optimizer("critic", "trainer.critic.optimizer", values)
    return fixed


def _asynchronous(values: Values) -> Fixed:
    """The batches of verl's fully asynchronous trainer: weights are sent after so many mini-batches."""
    if values["data.train_batch_size"]:
        return {}
    parts = product(values.get("async_training.require_batches"), values.get("async_training.trigger_parameter_sync_step"))
    groups = parts * values[f"{ACTOR}.ppo_mini_batch_size"]
    why = "CHECK: async_training: require_batches x trigger_parameter_sync_step mini-batches between two versions"
    found: Fixed = {"groups_per_iteration": (groups, why), "algorithm.minibatches": (parts, why)}
    found["max_staleness"] = (
        max(1, math.ceil(values.get("async_training.staleness_threshold", 0))),
        "CHECK: staleness_threshold",
    )
    if steps := values.get("rollout.total_rollout_steps"):
        found["iterations"] = (ratio(steps, groups), "total_rollout_steps, prompts / groups_per_iteration")
    return found


def _world(values: Values) -> int:
    return product(values["trainer.n_gpus_per_node"], values["trainer.nnodes"])


def _replicas(values: Values) -> int:
    nodes = values.get(f"{ROLLOUT}.nnodes") or values.get("rollout.nnodes")
    each = values.get(f"{ROLLOUT}.n_gpus_per_node") or values.get("rollout.n_gpus_per_node", values["trainer.n_gpus_per_node"])
    devices = product(nodes, each) if nodes else _world(values)
    return ratio(devices, values[f"{ROLLOUT}.tensor_model_parallel_size"])


def _ranks(values: Values) -> Fixed:
    """The layout of the learner: the data ranks are the devices without those of the other dimensions."""
    world, nodes = _world(values), values["trainer.nnodes"]
    sizes, why = sizes_of(values)
    if sizes["pipeline"] > 1 and sizes["pipeline"] % nodes:
        why = (
            f"CHECK: {sizes['pipeline']} stages cannot be spread over {nodes} machines here, so there is one; see"
            " trainer.parallel"
        )
        sizes["pipeline"] = 1
    data = ratio(world, product(*sizes.values()))
    found: Fixed = {f"trainer.parallel.{name}": (size, why) for name, size in sizes.items()}
    shared = " x ".join(str(size) for size in sizes.values())
    found["trainer.parallel.data"] = (data, f"{world} devices (n_gpus_per_node x nnodes) / ({shared})")
    return found


def _rewards(values: Values) -> tuple[object, str]:
    function, model = values.get("custom_reward_function.path"), values.get("reward_model.model.path")
    if values["algorithm.adv_estimator"] == "gdpo":
        keys = values.get("algorithm.gdpo_reward_keys") or []
        weights = values.get("algorithm.gdpo_reward_weights") or [1.0] * len(keys)
        if isinstance(keys, Unresolved) or isinstance(weights, Unresolved):
            return [placeholder("reward")], f"CHECK: the file does not say which parts and weights: {keys}, {weights}"
        parts = [placeholder(key, weight=weight) for key, weight in zip(keys, weights, strict=True)]
        return parts or [{"name": "math"}], "CHECK: gdpo_reward_keys; write a function for each part that compute_score returns"
    if function:
        options = {
            key.removeprefix("custom_reward_function.reward_kwargs."): value
            for key, value in values.items()
            if key.startswith("custom_reward_function.reward_kwargs.")
        }
        name = {"function": values["custom_reward_function.name"]} if values.get("custom_reward_function.name") else {}
        reward = {"file": path(function, values), **name, **({"options": options} if options else {})}
        check = "" if str(function).endswith(".py") and not isinstance(function, Unresolved) else "CHECK: "
        return [reward], f"{check}custom_reward_function.path: {function}; verl's function is called as verl calls it"
    if values.get("reward_model.enable"):
        return [{"model": path(model or "FILL_IN/reward-model", values)}], (
            f"CHECK: reward_model.enable, model: {model}; a local path or a name of the hub, of a sequence classifier"
        )
    return [{"name": "math"}], "CHECK: verl chooses a function by data_source; built-in here are math, numeric, exact, code, ..."


VERL = System("verl", "verl", RULES, DEFAULTS, _fixed, epochs="trainer.total_epochs", environment=environment)
