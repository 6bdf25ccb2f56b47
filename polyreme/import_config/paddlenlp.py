"""PaddleNLP: the JSON or YAML argument files of `llm/alignment/rl` (PPO, GRPO, REINFORCE++).

Keys and defaults: paddlenlp/rl/utils/config_utils.py.

Invariant: the table below is the only place that knows PaddleNLP's keys.
"""

from typing import Any

from polyreme.import_config.convert import lookup, name, overlong, path, positive, product, ratio, trackers
from polyreme.import_config.rules import Off, Rule, System, Values, idle, part_of

PRESETS = {"ppo": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_pp", "vapo": "ppo"}
CRITIC = ("ppo", "vapo")
MEMORY = "see trainer.offload; with placement: colocated, replicas and learner leave the devices to each other"


def _samples(values: Values) -> int:
    return int(values.get("rollout_n") or values.get("num_return_sequences") or 1)


def _prompts(values: Values) -> int:
    if values.get("global_batch_size"):
        return int(values["global_batch_size"])
    return product(values["per_device_prompt_batch_size"], values.get("sharding_parallel_degree"))


def _minibatches(values: Values) -> tuple[int, str]:
    size = values.get("global_mini_batch_size")
    if size:
        return (ratio(_prompts(values), size) if size > 0 else 1), "global_batch_size / global_mini_batch_size, both in prompts"
    step = product(
        values["per_device_train_batch_size"], values["gradient_accumulation_steps"], values.get("sharding_parallel_degree")
    )
    return min(
        _prompts(values), ratio(_prompts(values) * _samples(values), step)
    ), "samples per generation / samples per optimizer step"


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    algorithm = values["rl_algorithm"]
    place, key = ("loss", "kl_loss_coeff") if algorithm == "grpo" else ("reward", "kl_coeff")
    count, why = _minibatches(values)
    fixed: dict[str, tuple[Any, str]] = {
        "device": ("cuda", "the usual device"),
        "model.dtype": ("bfloat16", "bf16"),
        "groups_per_iteration": (_prompts(values), "prompts per generation on all devices"),
        "group_size": (_samples(values), "rollout_n, formerly num_return_sequences"),
        "algorithm.minibatches": (count, why),
        "algorithm.aggregation": ("token-mean", "the mean over tokens"),
        "rollout.max_model_len": (
            max(values["max_length"], values["max_prompt_len"] + values["max_dec_len"]),
            "max_length, at least max_prompt_len + max_dec_len",
        ),
        "trainer.parallel.data": (product(values.get("sharding_parallel_degree")), "sharding_parallel_degree"),
        "data.prompt_key": (values.get("prompt_key", "src"), "PaddleNLP's column of prompts"),
        "data.label_key": (values.get("response_key") or values.get("label_key") or "tgt", "PaddleNLP's column of labels"),
        "data.template": ("none", "its prompts are templated already (chat_template: none)"),
        "reward.rewards": ([{"name": "numeric"}], "CHECK: its rule compares the last number"),
    }
    if values[key]:
        for name, value in {"place": place, "estimator": "k3" if place == "loss" else "k1", "coef": values[key]}.items():
            fixed[f"algorithm.kl.{name}"] = (value, f"{key}: {values[key]}")
    else:
        fixed["algorithm.kl"] = (None, f"{key}: 0")
    if values.get("use_rm_server") and values.get("reward_server"):
        fixed["reward.rewards"] = ([{"url": values["reward_server"], "protocol": "paddlenlp"}], "use_rm_server, reward_server")
    elif values.get("reward_model_name_or_path") and not values.get("use_rule_reward"):
        where = path(values["reward_model_name_or_path"], values)
        fixed["reward.rewards"] = ([{"model": where}], "CHECK: reward_model_name_or_path, as a directory on this machine")
    return fixed


def _of_critic(value: Any, values: Values) -> Any:
    return value if values["rl_algorithm"] in CRITIC and value else Off()


def _schedule(value: Any, values: Values) -> Any:
    return lookup({"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"})(
        value, values
    )


def _recompute(value: Any, values: Values) -> Any:
    return ("full" if values.get("recompute_granularity", "full") == "full" else "selective") if value else Off()


RULES = (
    Rule("actor_model_name_or_path", "model.path", "CHECK: a Hugging Face directory on this machine", path),
    Rule("critic_model_name_or_path", "trainer.critic.path", "CHECK: a directory on this machine",
         lambda value, values: path(value, values) if values["rl_algorithm"] in CRITIC and value else Off()),
    Rule("train_datasets", "data.train", "CHECK: a file on this machine", path),
    Rule("eval_datasets", "data.eval", "CHECK: a file on this machine", path),
    Rule("max_prompt_len", "data.max_prompt_tokens", "longer prompts are left out, not cut"),
    Rule("max_dec_len", "rollout.max_new_tokens"),
    Rule("temperature", "rollout.temperature"),
    Rule("rollout_max_num_seqs", "rollout.max_num_seqs"),
    Rule("rollout_tensor_parallel_degree", "rollout.tensor_parallel", "-1: one device", lambda value, _: max(1, value)),
    Rule("rl_algorithm", "algorithm.preset", "vapo: ppo with other parameters", lookup(PRESETS)),
    Rule("update_iters", "algorithm.epochs"),
    Rule("clip_range_ratio", "algorithm.loss", "both bounds", lambda value, _: {"low": value, "high": value}),
    Rule("clip_range_ratio_low", "algorithm.loss.low", "", lambda value, _: value or Off()),
    Rule("clip_range_ratio_high", "algorithm.loss.high", "", lambda value, _: value or Off()),
    Rule("clip_range_value", "algorithm.advantage.value_clip", "", _of_critic),
    Rule("clip_range_score", "algorithm.shaping.clip", "scores within both signs of it", lambda value, _: [-value, value]),
    Rule("entropy_coeff", "algorithm.entropy_coef"),
    Rule("normalize_reward", "algorithm.shaping.normalise", "",
         lambda value, values: bool(value) if values["rl_algorithm"] != "grpo" else Off()),
    Rule("dynamic_sampling", "algorithm.dynamic_sampling"),
    Rule("learning_rate", "trainer.optimizer.lr"),
    Rule("min_learning_rate", "trainer.optimizer.min_lr", "not above learning_rate",
         lambda value, values: min(value, values["learning_rate"]) if value else Off()),
    Rule("lr_scheduler_type", "trainer.optimizer.schedule", "", _schedule),
    Rule("weight_decay", "trainer.optimizer.weight_decay"),
    Rule("adam_beta1", "trainer.optimizer.beta1"),
    Rule("adam_beta2", "trainer.optimizer.beta2"),
    Rule("adam_epsilon", "trainer.optimizer.eps"),
    Rule("max_grad_norm", "trainer.optimizer.clip_grad"),
    Rule("warmup_ratio", "trainer.optimizer.warmup", "x max_steps",
         lambda value, values: round(value * values["max_steps"]) if values.get("max_steps", -1) > 0 else Off()),
    Rule("critic_learning_rate", "trainer.critic.optimizer.lr", "", _of_critic),
    Rule("critic_weight_decay", "trainer.critic.optimizer.weight_decay", "",
         lambda value, values: value if values["rl_algorithm"] in CRITIC and values.get("critic_learning_rate") else Off()),
    Rule("pretrain_critic_steps", "trainer.critic.warmup_iterations", "", _of_critic),
    *idle("the critic shares the actor's ranks and schedule", "critic_*"),
    Rule("tensor_parallel_degree", "trainer.parallel.tensor"),
    Rule("max_steps", "iterations", "-1: num_train_epochs counts", lambda value, _: value if value > 0 else Off()),
    Rule("save_steps", "trainer.save_interval", "", positive),
    Rule("save_total_limit", "trainer.keep_checkpoints", "", lambda value, _: value or Off()),
    Rule("eval_steps", "eval_interval", "", positive),
    Rule("seed", "seed"),
    Rule("output_dir", "output_dir", "", path),
    Rule("report_to", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    Rule("dataloader_shuffle", "data.shuffle"),
    *part_of("iterations", "num_train_epochs"),
    *part_of("groups_per_iteration", "global_batch_size", "per_device_prompt_batch_size"),
    *part_of("group_size", "rollout_n", "num_return_sequences"),
    *part_of("algorithm.minibatches", "global_mini_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *part_of("algorithm.kl", "kl_coeff", "kl_loss_coeff"),
    *part_of("rollout.max_model_len", "max_length"),
    *part_of("reward.rewards", "reward_model_name_or_path", "reward_server", "use_rm_server", "use_rule_reward"),
    *part_of("trainer.parallel.data", "sharding_parallel_degree"),
    *part_of("data.prompt_key", "prompt_key"),
    *part_of("data.label_key", "response_key", "label_key"),
    *part_of("model.dtype", "bf16"),
    *idle("set algorithm.ptx with data, coef and batch_size", "ptx_coeff"),
    *idle("set algorithm.ptx with data, coef and batch_size", "ptx_datasets"),
    Rule("pipeline_parallel_degree", "trainer.parallel.pipeline", "-1: 1; every stage has equally many layers", lambda value, _: max(1, value)),
    *idle("an option of Paddle's schedule", "pipeline_parallel_*"),
    Rule("virtual_pp_degree", "trainer.parallel.virtual_pipeline"),
    *idle("the optimizer's state is always sharded over data ranks", "sharding*"),
    Rule("offload_optim", "trainer.offload.optimizer"),
    *idle(MEMORY, "offload_*"),
    Rule("recompute", "trainer.recompute", "with recompute_granularity; full_attn and core_attn: selective", _recompute),
    *idle("see trainer.recompute", "recompute_*"),
    Rule("enable_overlong_reward_buffer", "algorithm.shaping.overlong", "overlong_reward_buffer / max_dec_len, with overlong_penalty_factor",
         overlong("overlong_reward_buffer", "max_dec_len", "overlong_penalty_factor", 256)),
    *part_of("algorithm.shaping.overlong", "overlong_*"),
    Rule("early_stopping", "eval_stop_after", "early_stopping_patience", lambda value, values: values.get("early_stopping_patience", 4) if value else Off()),
    *part_of("eval_stop_after", "early_stopping_patience"),
    *idle("every evaluation that is better counts", "early_stopping_*"),
    Rule("run_name", "name", "lower-case letters, digits and hyphens", name),
    *idle("wandb reads its own environment variables", "wandb_*"),
    *idle("the weight of the policy's loss is 1", "pg_loss_coeff"),
    *idle("the stop tokens of generation_config.json end a response", "eos_token"),
    *idle("see data.max_prompt_tokens", "max_src_len"),
    *part_of("rollout.max_model_len", "max_seq_len"),
    *idle("list files and their weights in `data`", *(f"{use}_task_config" for use in ("train", "eval", "ptx"))),
    *idle("see eval_samples", "max_evaluate_steps"),
    *idle("the rate falls until the last iteration", "decay_steps"),
    *idle("there is no dropout", "dropout_warmup_steps", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *idle("prompts have one tokenization", *(f"{role}_tokenizer_alpha" for role in ("actor", "reward", "reward_critic"))),
    *idle("checkpoints fit every layout", "unified_checkpoint*"),
    *idle("see algorithm.preset", "stage"),
    *idle("logits stay divided over the tensor ranks", "tensor_parallel_output"),
    *idle("samples are drawn from the whole distribution", "top_p"),
    *idle("samples are drawn from the policy itself", "repetition_penalty"),
    *idle("a response ends where the policy ends it", "min_dec_len"),
    *idle("PPO whitens its advantages, GRPO normalises within the group", "normalize_advantage"),
    *idle("groups are filtered without a limit of batches", "max_gen_batches"),
    *idle("generation goes on until a batch is full", "global_gen_batch_size"),
    *idle("micro-batches are bounded by trainer.micro_batch_tokens", "per_device_*"),
    *idle("an option of Paddle's kernels and engine", "use_*"),
    *idle("an option of Paddle's kernels", "fused_*"),
    *idle("weights are float32 or bfloat16", "fp16*"),
    *idle("an option of Paddle", "amp_*"),
    *idle("every iteration is logged", "logging_*"),
    *idle("see eval_interval", "evaluation_strategy"),
    *idle("set data.template: chat for prompts that are not templated", "chat_template"),
    *idle("an option of Paddle's parallel layers", "sequence_parallel"),
    *idle("a pass has all prompts, and the next begins where a batch is not full", "dataloader_*"),
    *idle("samples are always balanced over data ranks", "balance_batch"),
    *idle("an option of Paddle's engine", "rollout_*"),
    *idle("see trainer.save_interval", "save_*"),
    *idle("every checkpoint is resumable", "ignore_save_lr_and_optim"),
    *idle("gradients have one buffer for the whole run", "release_grads"),
    *idle("the live view is shown on terminals only", "disable_tqdm"),
    *idle("metrics have the time of each part of an iteration", "skip_profile_timer"),
    *idle("there is no tuner", "autotuner_benchmark"),
    *idle("the reference shares the learner's ranks", "eval_mode"),
    *idle("a run trains, and evaluates when data.eval is set", "do_*"),
)  # fmt: skip

DEFAULTS = {
    "rl_algorithm": "ppo",
    "per_device_prompt_batch_size": 16,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_prompt_len": 4096,
    "max_dec_len": 512,
    "max_length": 2048,
    "learning_rate": 5e-5,
    "kl_coeff": 0.02,
    "kl_loss_coeff": 0.001,
    "clip_range_ratio": 0.2,
    "clip_range_score": 10.0,
    "clip_range_value": 5.0,
    "num_train_epochs": 1,
}

PADDLENLP = System("paddlenlp", "PaddleNLP", RULES, DEFAULTS, _fixed, epochs="num_train_epochs")
