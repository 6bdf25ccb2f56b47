"""verl: hydra's YAML, or the command line of `verl.trainer.main_ppo`.

Keys and defaults: verl/trainer/config/ppo_trainer.yaml and the files that it includes.

Invariant: the table below is the only place that knows verl's keys.
"""

from typing import Any

from polyreme.import_config.convert import (
    KL,
    above,
    adapters,
    lookup,
    name,
    overlong,
    path,
    paths,
    positive,
    product,
    ratio,
    trackers,
    when,
)
from polyreme.import_config.rules import Off, Rule, System, Values, idle, part_of

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
PRESETS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "opo": "opo",
}
MEMORY = "see trainer.offload; with placement: colocated, replicas and learner leave the devices to each other"
NO_GENERATION = "samples are drawn from the whole distribution, so that the learner's log-probabilities are those of the sampler"


def _kl_loss(value: Any, values: Values) -> Any:
    if not value:
        return Off()
    estimator = KL.get(values[f"{ACTOR}.kl_loss_type"], "k3")
    return {"place": "loss", "estimator": estimator, "coef": values[f"{ACTOR}.kl_loss_coef"]}


def _kl_reward(value: Any, values: Values) -> Any:
    coef = values["algorithm.kl_ctrl.kl_coef"]
    if not value or not coef or values.get(f"{ACTOR}.use_kl_loss"):
        return Off()
    kl = {"place": "reward", "estimator": KL.get(values["algorithm.kl_penalty"], "k1"), "coef": coef}
    if values.get("algorithm.kl_ctrl.type") == "adaptive":
        target, horizon = values.get("algorithm.kl_ctrl.target_kl", 0.1), values.get("algorithm.kl_ctrl.horizon", 10000)
        kl |= {"adaptive": {"target": target, "horizon": int(horizon)}}
    return kl


def _world(values: Values) -> int:
    return product(values["trainer.n_gpus_per_node"], values["trainer.nnodes"])


def _micro(value: Any, values: Values) -> Any:
    return value * (values["data.max_prompt_length"] + values["data.max_response_length"]) if value else Off()


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    fixed: dict[str, tuple[Any, str]] = {
        "placement": ("colocated", "verl generates on the trainer's devices"),
        "algorithm.kl": (None, "neither use_kl_loss nor use_kl_in_reward"),
        "rollout.max_model_len": (longest, "data.max_prompt_length + data.max_response_length"),
        "rollout.replicas": (
            ratio(_world(values), values[f"{ROLLOUT}.tensor_model_parallel_size"]),
            "trainer.n_gpus_per_node x nnodes / rollout.tensor_model_parallel_size",
        ),
        "trainer.parallel.data": (_world(values), "trainer.n_gpus_per_node x nnodes; FSDP's ranks are data-parallel here"),
        "data.label_key": ("reward_model.ground_truth", "verl's column of reference answers"),
        "algorithm.loss.kind": ("clip", "policy_loss.loss_mode: vanilla"),
        "model.dtype": ("bfloat16", "verl's mixed precision"),
    }
    if not values.get("custom_reward_function.path"):
        fixed["reward.rewards"] = (
            [{"name": "math"}],
            "CHECK: verl chooses a function by data_source; built-in here are math, numeric, exact, code, ...",
        )
    return fixed


def _clip(name: str) -> Any:
    return lambda value, values: {"low": value, "high": value} if name == "both" else {name: value}


RULES = (
    Rule("data.train_files", "data.train", "", paths),
    Rule("data.val_files", "data.eval", "", paths),
    Rule("data.prompt_key", "data.prompt_key"),
    Rule("data.max_prompt_length", "data.max_prompt_tokens"),
    Rule("data.max_response_length", "rollout.max_new_tokens"),
    Rule("data.train_batch_size", "groups_per_iteration", "prompts per iteration in both"),
    Rule("data.shuffle", "data.shuffle"),
    Rule("data.seed", "data.shuffle_seed"),
    Rule("data.filter_overlong_prompts", "data.overlong", "true: filter, false: error", lambda v, _: "filter" if v else "error"),
    *idle("prompts are never cut; see data.overlong", "data.truncation"),
    *idle("name it in reward.choose_by, with one reward of each name that the column has", "data.reward_fn_key"),
    *idle("an evaluation sends all its prompts at once", "data.val_batch_size"),
    *idle("rows are read by their columns alone", "data.*"),
    Rule(f"{MODEL}.path", "model.path", "CHECK: a directory on this machine, not the name of a repository", path),
    Rule(f"{MODEL}.enable_gradient_checkpointing", "trainer.recompute", "true: full", lookup({True: "full"})),
    *idle("sequences are always packed without padding", f"{MODEL}.use_remove_padding"),
    Rule(f"{MODEL}.lora_rank", "trainer.lora", "0: all weights are trained", adapters(f"{MODEL}.lora_alpha", 16)),
    *part_of("trainer.lora", f"{MODEL}.lora_alpha"),
    *idle("an option of verl's model wrapper", f"{MODEL}.*"),
    Rule(f"{ACTOR}.optim.lr", "trainer.optimizer.lr"),
    Rule(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay"),
    Rule(f"{ACTOR}.optim.lr_warmup_steps", "trainer.optimizer.warmup", "verl's steps are iterations; -1: none", positive),
    Rule(f"{ACTOR}.optim.warmup_style", "trainer.optimizer.schedule", "", lookup({"constant": "constant", "cosine": "cosine"})),
    *idle("an option of verl's optimizer", f"{ACTOR}.optim.*"),
    Rule(f"{ACTOR}.grad_clip", "trainer.optimizer.clip_grad"),
    Rule(
        f"{ACTOR}.ppo_mini_batch_size",
        "algorithm.minibatches",
        "data.train_batch_size / ppo_mini_batch_size, both in prompts",
        lambda value, values: ratio(values["data.train_batch_size"], value),
    ),
    Rule(f"{ACTOR}.ppo_epochs", "algorithm.epochs"),
    Rule(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", "x (prompt + response length)", _micro),
    *idle("micro-batches are bounded by trainer.micro_batch_tokens", f"{ACTOR}.ppo_micro_batch_size"),
    Rule(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", "with use_dynamic_bsz", when(f"{ACTOR}.use_dynamic_bsz")),
    *idle("micro-batches are always bounded in tokens", f"{ACTOR}.use_dynamic_bsz"),
    Rule(f"{ACTOR}.clip_ratio", "algorithm.loss", "both bounds", _clip("both")),
    Rule(f"{ACTOR}.clip_ratio_low", "algorithm.loss", "", _clip("low")),
    Rule(f"{ACTOR}.clip_ratio_high", "algorithm.loss", "", _clip("high")),
    Rule(f"{ACTOR}.clip_ratio_c", "algorithm.loss", "", _clip("dual")),
    Rule(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation"),
    Rule(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef"),
    Rule(f"{ACTOR}.use_kl_loss", "algorithm.kl", "with kl_loss_type and kl_loss_coef", _kl_loss),
    *part_of("algorithm.kl", f"{ACTOR}.kl_loss_*"),
    Rule(f"{ACTOR}.policy_loss.loss_mode", "algorithm.loss", "gspo: one ratio per response",
         lambda value, values: {"ratio": "sequence"} if value == "gspo" else Off()),
    *idle("an option of a loss that is not used", f"{ACTOR}.policy_loss.*"),
    *idle("the order of samples does not matter: a mini-batch consists of whole groups", f"{ACTOR}.shuffle"),
    *idle("the learner is Megatron-Core", f"{ACTOR}.strategy"),
    Rule(f"{ACTOR}.fsdp_config.optimizer_offload", "trainer.offload.optimizer"),
    *idle(MEMORY, f"{ACTOR}.fsdp_config.*"),
    Rule(f"{ACTOR}.megatron.tensor_model_parallel_size", "trainer.parallel.tensor"),
    Rule(f"{ACTOR}.megatron.pipeline_model_parallel_size", "trainer.parallel.pipeline", "every stage has equally many layers"),
    Rule(f"{ACTOR}.megatron.expert_model_parallel_size", "trainer.parallel.expert"),
    *idle("an option of verl's actor worker", f"{ACTOR}.*"),
    Rule(f"{ROLLOUT}.n", "group_size"),
    Rule(f"{ROLLOUT}.temperature", "rollout.temperature"),
    *idle(NO_GENERATION, f"{ROLLOUT}.top_p"),
    *idle(NO_GENERATION, f"{ROLLOUT}.top_k"),
    Rule(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel"),
    Rule(f"{ROLLOUT}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    Rule(f"{ROLLOUT}.max_num_seqs", "rollout.max_num_seqs"),
    Rule(f"{ROLLOUT}.max_model_len", "rollout.max_model_len", "", lambda value, values: value or Off()),
    Rule(f"{ROLLOUT}.name", "rollout.engine", "", lookup({"vllm": "vllm"})),
    Rule(f"{ROLLOUT}.dtype", "model.dtype", "", lookup({"bfloat16": "bfloat16", "float32": "float32"})),
    *idle("the learner's forward passes use trainer.micro_batch_tokens", f"{ROLLOUT}.log_prob_*"),
    Rule(f"{ROLLOUT}.val_kwargs.n", "eval_answers", "one answer is greedy, several are sampled"),
    Rule(f"{ROLLOUT}.val_kwargs.temperature", "eval_temperature", "of several answers", above(0)),
    *idle("one answer is greedy, several are drawn from the whole distribution", f"{ROLLOUT}.val_kwargs.*"),
    *idle("there are no tools and further turns", f"{ROLLOUT}.multi_turn.*"),
    *idle("an option of verl's rollout worker", f"{ROLLOUT}.*"),
    *idle("the reference shares the learner's ranks and micro-batches", "actor_rollout_ref.ref.*"),
    *idle("an option of verl's hybrid engine", "actor_rollout_ref.*"),
    Rule("critic.optim.lr", "trainer.critic.optimizer.lr", "", when("algorithm.adv_estimator", "gae")),
    Rule("critic.optim.weight_decay", "trainer.critic.optimizer.weight_decay", "", when("algorithm.adv_estimator", "gae")),
    Rule("critic.model.path", "trainer.critic.path", "CHECK: a directory on this machine",
         lambda value, values: path(value, values) if values["algorithm.adv_estimator"] == "gae" else Off()),
    Rule("critic.cliprange_value", "algorithm.advantage.value_clip", "", when("algorithm.adv_estimator", "gae")),
    *idle("the critic shares the actor's ranks, batches and micro-batches, or there is none", "critic.*"),
    Rule("algorithm.adv_estimator", "algorithm.preset", "", lookup(PRESETS)),
    Rule("algorithm.gamma", "algorithm.advantage.gamma", "", when("algorithm.adv_estimator", "gae")),
    Rule("algorithm.lam", "algorithm.advantage.lam", "", when("algorithm.adv_estimator", "gae")),
    Rule("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.kind", "false: the group mean alone",
         lambda value, values: "group_mean" if not value and values["algorithm.adv_estimator"] == "grpo" else Off()),
    Rule("algorithm.use_kl_in_reward", "algorithm.kl", "with kl_penalty and kl_ctrl", _kl_reward),
    *part_of("algorithm.kl", "algorithm.kl_penalty"),
    *part_of("algorithm.kl", "algorithm.kl_ctrl.*"),
    Rule("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
    *idle("groups are filtered by their scores, without a limit of batches", "algorithm.filter_groups.*"),
    *idle("not among our algorithms' parameters", "algorithm.*"),
    Rule("custom_reward_function.path", "reward.rewards", "verl's function is called as verl calls it",
         lambda value, values: [{"file": path(value, values),
                                 **({"function": function} if (function := values.get("custom_reward_function.name")) else {})}]
         if value else Off()),
    *part_of("reward.rewards", "custom_reward_function.name"),
    *idle("set reward.rewards.0.options", "custom_reward_function.*"),
    *idle("for a reward model, add {model: DIRECTORY} to reward.rewards", "reward_model.enable"),
    Rule("reward_model.overlong_buffer.enable", "algorithm.shaping.overlong", "with its len and penalty_factor",
         overlong("reward_model.overlong_buffer.len", "data.max_response_length", "reward_model.overlong_buffer.penalty_factor")),
    *part_of("algorithm.shaping.overlong", "reward_model.overlong_buffer.*"),
    *idle("a reward model is a reward of its own: {model: DIRECTORY}", "reward_model.*"),
    Rule("trainer.nnodes", "trainer.parallel.nodes"),
    *part_of("trainer.parallel.data and rollout.replicas", "trainer.n_gpus_per_node"),
    Rule("trainer.total_training_steps", "iterations", "", lambda value, values: value or Off()),
    *part_of("iterations", "trainer.total_epochs"),
    Rule("trainer.save_freq", "trainer.save_interval", "-1: only after the last iteration", positive),
    Rule("trainer.test_freq", "eval_interval", "-1: only before the first iteration and after the last", positive),
    Rule("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints", "", lambda value, values: value or Off()),
    Rule("trainer.critic_warmup", "trainer.critic.warmup_iterations", "", when("algorithm.adv_estimator", "gae")),
    Rule("trainer.experiment_name", "name", "lower-case letters, digits and hyphens", name),
    *idle("set trackers.0.project", "trainer.project_name"),
    Rule("trainer.logger", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    Rule("trainer.device", "device"),
    Rule("trainer.default_local_dir", "output_dir", "", path),
    *idle("an option of verl's trainer", "trainer.*"),
    *idle("there is no Ray: the services are processes", "ray_kwargs.*"),
    *idle("there is no Ray: the services are processes", "ray_init.*"),
    *idle("metrics have the time of each part of an iteration", "global_profiler.*"),
)  # fmt: skip


DEFAULTS = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    f"{MODEL}.path": "~/models/deepseek-llm-7b-chat",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.max_num_seqs": 1024,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.device": "cuda",
}

VERL = System("verl", "verl", RULES, DEFAULTS, _fixed, epochs="trainer.total_epochs")
