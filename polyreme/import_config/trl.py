"""TRL: the YAML file of `trl grpo` or `trl rloo`, whose keys are those of GRPOConfig and ScriptArguments.

Invariant: the table below is the only place that knows TRL's keys.
"""

from typing import Any

from polyreme.import_config.convert import above, adapters, lookup, path, positive, product, ratio, trackers
from polyreme.import_config.rules import Off, Rule, System, Values, idle, part_of

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
REWARDS = {"accuracy_reward": "math", "accuracy": "math", "think_format_reward": "think_format", "format": "think_format"}


def _completions(values: Values) -> int:
    """Completions of one generation."""
    given = values.get("generation_batch_size")
    steps = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    return int(given or product(values["per_device_train_batch_size"], values.get("num_processes"), steps))


def _updates(values: Values) -> int:
    """Optimizer steps of a pass over one generation."""
    steps = values["gradient_accumulation_steps"]
    return ratio(values.get("steps_per_generation") or steps, steps)


def _iterations(value: Any, values: Values) -> Any:
    """Optimizer steps as iterations. A fraction of the training is no number of steps."""
    if not isinstance(value, int) or value <= 0:
        return Off()
    return ratio(value, _updates(values) * (values.get("num_iterations") or 1))


def _rewards(names: Any, values: Values) -> Any:
    names = [names] if isinstance(names, str) else names or []
    weights = values.get("reward_weights") or [1.0] * len(names)
    found: dict[str, dict[str, Any]] = {}
    for name, weight in zip(names, weights, strict=False):
        if short := REWARDS.get(name.rpartition(".")[2]):
            found[short] = {"name": short, "weight": weight}
        elif "." in name:
            module, _, function = name.rpartition(".")
            found[name] = {"name": function, "module": module, "function": function, "weight": weight}
    return list(found.values()) or Off()


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    prompts = ratio(_completions(values), values["num_generations"])
    beta = values["beta"]
    longest = values["max_prompt_length"] + values["max_completion_length"]
    fixed: dict[str, tuple[Any, str]] = {
        "device": ("cuda", "the usual device"),
        "model.dtype": ("bfloat16" if values.get("bf16", True) else "float32", "bf16"),
        "groups_per_iteration": (
            prompts,
            f"{_completions(values)} completions per generation (per_device_train_batch_size x num_processes x"
            f" gradient_accumulation_steps) / num_generations",
        ),
        "algorithm.preset": ("grpo", "GRPOConfig"),
        "algorithm.loss.kind": ("clip", "GRPOConfig"),
        "algorithm.minibatches": (min(_updates(values), prompts), "steps_per_generation / gradient_accumulation_steps"),
        "rollout.max_model_len": (longest, "max_prompt_length + max_completion_length"),
        "trainer.parallel.data": (product(values.get("num_processes")), "num_processes"),
        "reward.rewards": ([{"name": "math"}], "CHECK: no reward function that we have"),
        "data.label_key": ("solution", "CHECK: TRL passes every column to the reward; name the one with reference answers"),
    }
    if beta:
        for key, value in {"place": "loss", "estimator": "k3", "coef": beta}.items():
            fixed[f"algorithm.kl.{key}"] = (value, f"beta: {beta}")
    else:
        fixed["algorithm.kl"] = (None, "beta: 0, no reference model")
    return fixed


RULES = (
    Rule("model_name_or_path", "model.path", "CHECK: a directory on this machine, not the name of a repository", path),
    Rule("dataset_name", "data.train", "CHECK: a file or directory on this machine, not the name of a repository", path),
    Rule("num_generations", "group_size"),
    Rule("max_completion_length", "rollout.max_new_tokens"),
    Rule("max_prompt_length", "data.max_prompt_tokens"),
    Rule("temperature", "rollout.temperature"),
    Rule("learning_rate", "trainer.optimizer.lr"),
    Rule("weight_decay", "trainer.optimizer.weight_decay"),
    Rule("adam_beta1", "trainer.optimizer.beta1"),
    Rule("adam_beta2", "trainer.optimizer.beta2"),
    Rule("adam_epsilon", "trainer.optimizer.eps"),
    Rule("max_grad_norm", "trainer.optimizer.clip_grad"),
    Rule("lr_scheduler_type", "trainer.optimizer.schedule", "",
         lookup({"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
                 "cosine_with_min_lr": "cosine"})),
    Rule("warmup_steps", "trainer.optimizer.warmup", "steps of the optimizer; iterations here", positive),
    *idle("set trainer.optimizer.warmup, in iterations", "warmup_ratio"),
    Rule("epsilon", "algorithm.loss", "both bounds", lambda value, _: {"low": value, "high": value}),
    Rule("epsilon_high", "algorithm.loss.high", "", lambda value, _: Off() if value is None else value),
    Rule("delta", "algorithm.loss.dual", "", lambda value, _: Off() if value is None else value),
    Rule("importance_sampling_level", "algorithm.loss.ratio"),
    Rule("loss_type", "algorithm.aggregation", "", lookup(AGGREGATIONS)),
    Rule("scale_rewards", "algorithm.advantage.kind", "false: the group mean alone",
         lambda value, _: "group_mean" if value in (False, "none", "False") else Off()),
    Rule("num_iterations", "algorithm.epochs"),
    Rule("mask_truncated_completions", "algorithm.shaping.truncation_mask"),
    Rule("entropy_coef", "algorithm.entropy_coef"),
    Rule("max_steps", "iterations", "optimizer steps / steps per iteration; -1: num_train_epochs counts", _iterations),
    Rule("reward_funcs", "reward.rewards", "with reward_weights; a function of a module stays one", _rewards),
    *part_of("reward.rewards", "reward_weights"),
    *part_of("groups_per_iteration", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
             "generation_batch_size", "num_processes"),
    *part_of("iterations", "num_train_epochs"),
    *part_of("algorithm.kl", "beta"),
    *part_of("model.dtype", "bf16", "torch_dtype", "dtype"),
    Rule("seed", "seed"),
    Rule("shuffle_dataset", "data.shuffle"),
    Rule("save_steps", "trainer.save_interval", "optimizer steps / steps per iteration", _iterations),
    Rule("save_total_limit", "trainer.keep_checkpoints", "", lambda value, _: value or Off()),
    Rule("eval_steps", "eval_interval", "optimizer steps / steps per iteration", _iterations),
    Rule("report_to", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    Rule("output_dir", "output_dir", "", path),
    Rule("vllm_tensor_parallel_size", "rollout.tensor_parallel"),
    Rule("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    Rule("vllm_mode", "placement", "colocate: colocated, server: separate", lookup({"colocate": "colocated", "server": "separate"})),
    *idle("replicas are processes or machines of their own", "vllm_*"),
    *idle("replicas always run vLLM", "use_vllm"),
    *idle("samples are drawn from the whole distribution", "top_*"),
    *idle("set algorithm.kl.renew_interval", "sync_ref_model"),
    Rule("use_peft", "trainer.lora", "with lora_r and lora_alpha",
         lambda value, values: adapters("lora_alpha", 32)(values.get("lora_r", 16), values) if value else Off()),
    *part_of("trainer.lora", "lora_r", "lora_alpha"),
    *idle("see trainer.lora", "lora_*"),
    Rule("gradient_checkpointing", "trainer.recompute", "true: full", lookup({True: "full"})),
    *idle("see trainer.recompute", "gradient_checkpointing_*"),
    Rule("num_generations_eval", "eval_answers", "one answer is greedy, several are sampled", above(0)),
    *idle("name a file, a directory or files with `*` in data.train", "dataset_*"),
    *idle("an evaluation sends all its prompts at once", "per_device_eval_batch_size"),
    *idle("set data.eval", "do_eval"),
    *idle("see eval_interval", "eval_strategy"),
    *idle("see trainer.save_interval", "save_strategy"),
    *idle("every iteration is logged", "logging_*"),
    *idle("every iteration is logged, samples too", "log_*"),
    *idle("nothing is uploaded", "hub_*"),
    *idle("nothing is uploaded", "push_to_hub*"),
    Rule("system_prompt", "data.system"),
    *idle("an option of transformers", "attn_implementation"),
    *idle("an option of transformers", "model_*"),
    *idle("an existing run needs --resume or --fork", "overwrite_output_dir"),
)  # fmt: skip

DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "num_train_epochs": 3,
}

TRL = System("trl", "TRL", RULES, DEFAULTS, _fixed, epochs="num_train_epochs")
