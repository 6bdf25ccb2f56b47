"""PaddleNLP: the JSON or YAML argument files of `llm/alignment/rl` (PPO, GRPO, REINFORCE++).

Keys and defaults: paddlenlp/rl/utils/config_utils.py.

Invariant: the table below is the only place that knows PaddleNLP's keys.
"""

from typing import Any

from polyreme.import_config.convert import lookup, name, overlong, path, positive, product, ratio, trackers
from polyreme.import_config.rules import NOTHING, Rule, System, Values, part_of

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
    return value if values["rl_algorithm"] in CRITIC and value else NOTHING


def _schedule(value: Any, values: Values) -> Any:
    return lookup({"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"})(
        value, values
    )


def _recompute(value: Any, values: Values) -> Any:
    return ("full" if values.get("recompute_granularity", "full") == "full" else "selective") if value else NOTHING


RULES = (
    Rule("actor_model_name_or_path", "model.path", "CHECK: a Hugging Face directory on this machine", path),
    Rule("critic_model_name_or_path", "trainer.critic.path", "CHECK: a directory on this machine",
         lambda value, values: path(value, values) if values["rl_algorithm"] in CRITIC and value else NOTHING),
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
    Rule("clip_range_ratio_low", "algorithm.loss.low", "", lambda value, _: value or NOTHING),
    Rule("clip_range_ratio_high", "algorithm.loss.high", "", lambda value, _: value or NOTHING),
    Rule("clip_range_value", "algorithm.advantage.value_clip", "", _of_critic),
    Rule("clip_range_score", "algorithm.shaping.clip", "scores within both signs of it", lambda value, _: [-value, value]),
    Rule("entropy_coeff", "algorithm.entropy_coef"),
    Rule("normalize_reward", "algorithm.shaping.normalise", "",
         lambda value, values: bool(value) if values["rl_algorithm"] != "grpo" else NOTHING),
    Rule("dynamic_sampling", "algorithm.dynamic_sampling"),
    Rule("learning_rate", "trainer.optimizer.lr"),
    Rule("min_learning_rate", "trainer.optimizer.min_lr", "not above learning_rate",
         lambda value, values: min(value, values["learning_rate"]) if value else NOTHING),
    Rule("lr_scheduler_type", "trainer.optimizer.schedule", "", _schedule),
    Rule("weight_decay", "trainer.optimizer.weight_decay"),
    Rule("adam_beta1", "trainer.optimizer.beta1"),
    Rule("adam_beta2", "trainer.optimizer.beta2"),
    Rule("adam_epsilon", "trainer.optimizer.eps"),
    Rule("max_grad_norm", "trainer.optimizer.clip_grad"),
    Rule("warmup_ratio", "trainer.optimizer.warmup", "x max_steps",
         lambda value, values: round(value * values["max_steps"]) if values.get("max_steps", -1) > 0 else NOTHING),
    Rule("critic_learning_rate", "trainer.critic.optimizer.lr", "", _of_critic),
    Rule("critic_weight_decay", "trainer.critic.optimizer.weight_decay", "",
         lambda value, values: value if values["rl_algorithm"] in CRITIC and values.get("critic_learning_rate") else NOTHING),
    Rule("pretrain_critic_steps", "trainer.critic.warmup_iterations", "", _of_critic),
    Rule("critic_*", "", "the critic shares the actor's ranks and schedule"),
    Rule("tensor_parallel_degree", "trainer.parallel.tensor"),
    Rule("max_steps", "iterations", "-1: num_train_epochs counts", lambda value, _: value if value > 0 else NOTHING),
    Rule("save_steps", "trainer.save_interval", "", positive),
    Rule("save_total_limit", "trainer.keep_checkpoints", "", lambda value, _: value or NOTHING),
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
    Rule("ptx_coeff", "", "set algorithm.ptx with data, coef and batch_size"),
    Rule("ptx_datasets", "", "set algorithm.ptx with data, coef and batch_size"),
    Rule("pipeline_parallel_degree", "trainer.parallel.pipeline", "-1: 1; every stage has equally many layers", lambda value, _: max(1, value)),
    Rule("pipeline_parallel_*", "", "an option of Paddle's schedule"),
    Rule("virtual_pp_degree", "trainer.parallel.virtual_pipeline"),
    Rule("sharding*", "", "the optimizer's state is always sharded over data ranks"),
    Rule("offload_optim", "trainer.offload.optimizer"),
    Rule("offload_*", "", MEMORY),
    Rule("recompute", "trainer.recompute", "with recompute_granularity; full_attn and core_attn: selective", _recompute),
    Rule("recompute_*", "", "see trainer.recompute"),
    Rule("enable_overlong_reward_buffer", "algorithm.shaping.overlong", "overlong_reward_buffer / max_dec_len, with overlong_penalty_factor",
         overlong("overlong_reward_buffer", "max_dec_len", "overlong_penalty_factor", 256)),
    *part_of("algorithm.shaping.overlong", "overlong_*"),
    Rule("early_stopping", "eval_stop_after", "early_stopping_patience", lambda value, values: values.get("early_stopping_patience", 4) if value else NOTHING),
    *part_of("eval_stop_after", "early_stopping_patience"),
    Rule("early_stopping_*", "", "every evaluation that is better counts"),
    Rule("run_name", "name", "lower-case letters, digits and hyphens", name),
    Rule("wandb_*", "", "wandb reads its own environment variables"),
    Rule("pg_loss_coeff", "", "the weight of the policy's loss is 1"),
    Rule("eos_token", "", "the stop tokens of generation_config.json end a response"),
    Rule("max_src_len", "", "see data.max_prompt_tokens"),
    *part_of("rollout.max_model_len", "max_seq_len"),
    *(Rule(f"{use}_task_config", "", "list files and their weights in `data`") for use in ("train", "eval", "ptx")),
    Rule("max_evaluate_steps", "", "see eval_samples"),
    Rule("decay_steps", "", "the rate falls until the last iteration"),
    *(Rule(key, "", "there is no dropout") for key in ("dropout_warmup_steps", "hidden_dropout_prob", "attention_probs_dropout_prob")),
    *(Rule(f"{role}_tokenizer_alpha", "", "prompts have one tokenization") for role in ("actor", "reward", "reward_critic")),
    Rule("unified_checkpoint*", "", "checkpoints fit every layout"),
    Rule("stage", "", "see algorithm.preset"),
    Rule("tensor_parallel_output", "", "logits stay divided over the tensor ranks"),
    Rule("top_p", "", "samples are drawn from the whole distribution"),
    Rule("repetition_penalty", "", "samples are drawn from the policy itself"),
    Rule("min_dec_len", "", "a response ends where the policy ends it"),
    Rule("normalize_advantage", "", "PPO whitens its advantages, GRPO normalises within the group"),
    Rule("max_gen_batches", "", "groups are filtered without a limit of batches"),
    Rule("global_gen_batch_size", "", "generation goes on until a batch is full"),
    Rule("per_device_*", "", "micro-batches are bounded by trainer.micro_batch_tokens"),
    Rule("use_*", "", "an option of Paddle's kernels and engine"),
    Rule("fused_*", "", "an option of Paddle's kernels"),
    Rule("fp16*", "", "weights are float32 or bfloat16"),
    Rule("amp_*", "", "an option of Paddle"),
    Rule("logging_*", "", "every iteration is logged"),
    Rule("evaluation_strategy", "", "see eval_interval"),
    Rule("chat_template", "", "set data.template: chat for prompts that are not templated"),
    Rule("sequence_parallel", "", "an option of Paddle's parallel layers"),
    Rule("dataloader_*", "", "a pass has all prompts, and the next begins where a batch is not full"),
    Rule("balance_batch", "", "samples are always balanced over data ranks"),
    Rule("rollout_*", "", "an option of Paddle's engine"),
    Rule("save_*", "", "see trainer.save_interval"),
    Rule("ignore_save_lr_and_optim", "", "every checkpoint is resumable"),
    Rule("release_grads", "", "gradients have one buffer for the whole run"),
    Rule("disable_tqdm", "", "the live view is shown on terminals only"),
    Rule("skip_profile_timer", "", "metrics have the time of each part of an iteration"),
    Rule("autotuner_benchmark", "", "there is no tuner"),
    Rule("eval_mode", "", "the reference shares the learner's ranks"),
    Rule("do_*", "", "a run trains, and evaluates when data.eval is set"),
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
