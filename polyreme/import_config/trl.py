"""TRL: the YAML file, command line or Python script for GRPO or RLOO, with keys of GRPOConfig, RLOOConfig and ScriptArguments.

Invariant: the table below is the only place that knows the fate of TRL's keys.
"""

import re
from collections.abc import Callable

from polyreme.errors import ConfigError
from polyreme.import_config.convert import (
    NAME_OR_PATH,
    above,
    adapters,
    at_revision,
    choice,
    given,
    name,
    of_name,
    path,
    trackers,
    unless_given,
    when,
)
from polyreme.import_config.hugging_face import minimum, schedule, warmup_ratio
from polyreme.import_config.reading.launch import value_of
from polyreme.import_config.rules import Convert, Lost, Noted, Off, Rule, System, Values, flatten, idle, lost, part_of
from polyreme.import_config.trl_batches import steps, warmup_steps
from polyreme.import_config.trl_parts import datasets, environment, fixed, reference

DPO, SFT = "Use `polyreme dpo` (docs/stages.md).", "Use `polyreme sft` (docs/stages.md)."
OTHERS = {
    "num_ppo_epochs": (
        "PPOConfig or the first RLOOConfig",
        "Write its run with `polyreme init` and algorithm.preset: ppo or rloo.",
    ),
    "cliprange_value": ("PPOConfig", "Write its run with `polyreme init` and algorithm.preset: ppo."),
    "rloo_k": ("the first RLOOConfig", "Write its run with `polyreme init` and algorithm.preset: rloo."),
    "precompute_ref_log_probs": ("DPOConfig", DPO),
    "rpo_alpha": ("DPOConfig", DPO),
    "desirable_weight": ("KTOConfig", "Use `polyreme dpo` with loss.kind: kto (docs/stages.md)."),
    "cpo_alpha": ("CPOConfig", "Use `polyreme dpo` with loss.kind: simpo (docs/stages.md)."),
    "completion_only_loss": ("SFTConfig", SFT),
    "assistant_only_loss": ("SFTConfig", SFT),
    "dataset_text_field": ("SFTConfig", SFT),
    "packing": ("SFTConfig", SFT),
    "center_rewards_coefficient": ("RewardConfig", "Use `polyreme reward-model` (docs/stages.md)."),
    "lmbda": ("GKDConfig", "Write its run with `polyreme init` and algorithm.preset: distillation."),
}
"""Keys of TRL's other trainers: the title of the configuration, and what to do."""
DPO_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "discopop",
    "apo_zero",
    "kto",
    "simpo",
)
OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_npu_fused"), True)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _optimizer(value: object, values: Values) -> object:
    if value in OPTIMIZERS:
        return Off("Adam with decoupled weight decay, as here")
    if "adamw" in str(value):
        return Lost("moments with fewer bits, or in the host's memory; here they are float32 (see trainer.offload)")
    return choice("an optimizer", OPTIMIZERS)(value, values)


def _min_ratio(values: Values) -> float:
    absolute = values.get("lr_scheduler_kwargs.min_lr")
    return absolute / values["learning_rate"] if absolute is not None else values.get("lr_scheduler_kwargs.min_lr_rate", 0.0)


def _targets(value: object, values: Values) -> object:
    names = value if isinstance(value, list) else [value]
    if not values.get("use_peft") or names == ["all-linear"]:
        return Off("all linear layers, or no adapters")
    if value is None:
        return Noted(
            ["q_proj", "v_proj"], "CHECK: PEFT's choice for Llama, Qwen, Mistral and Gemma; other models may have another one"
        )
    return names if set(names) <= set(LINEAR) else Lost("no such linear layers here; adapters are on all")


def _when_strategy(key: str) -> Convert:
    return lambda value, values: steps(value, values) if values.get(key, "steps") == "steps" else Off(f"{key} is not steps")


def _without(key: str) -> Callable[[Values], str]:
    return lambda values: "" if values.get(key) else f"without {key}"


RULES = (
    Rule("model_name_or_path", "model.path", NAME_OR_PATH, at_revision("model_revision")),
    *part_of("model.path", "model_revision"),
    Rule("dataset_name", "data.train", NAME_OR_PATH,
         unless_given("datasets", unless_given("dataset_mixture.datasets", path))),
    Rule("datasets", "data.train", "", datasets),
    Rule("dataset_mixture.datasets", "data.train", "", datasets),
    Rule("dataset_prompt_column", "data.prompt_key"),
    Rule("dataset_config", "data.config", "", of_name("dataset_name")),
    Rule("dataset_train_split", "data.split", "", of_name("dataset_name", "train")),
    *lost("another part of the data set: name it in data.config", "dataset_configs", unless=(None, "default", "main", ["all"])),
    *idle("name a file, a directory or files with `*` in data.train", "dataset_streaming", "streaming", "dataset_num_proc",
          "dataset_mixture.seed", "dataset_mixture.test_split_size", "test_split_size"),
    *idle("only evaluation reads it; set data.eval to the name with this split, or to a file", "dataset_test_split",
          "eval_dataset"),
    Rule("system_prompt", "data.system"),
    *lost("another chat template: put it into the tokenizer's directory", "chat_template", "chat_template_path"),
    *lost("arguments of the chat template: put them into the template or the data", "chat_template_kwargs.*",
          "chat_template_kwargs"),
    *part_of("group_size", "num_generations"),
    *part_of("rollout.max_new_tokens", "max_completion_length"),
    *part_of("data.max_prompt_tokens", "max_prompt_length"),
    *part_of("groups_per_iteration", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
             "generation_batch_size", "num_processes"),
    *part_of("iterations", "num_train_epochs"),
    *part_of("algorithm.kl", "beta", "use_bias_correction_kl"),
    *part_of("algorithm.loss", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "sapo_temperature_pos",
             "sapo_temperature_neg", "loss_type"),
    *part_of("algorithm.advantage", "scale_rewards", "multi_objective_aggregation"),
    *part_of("algorithm.preset", "normalize_advantages"),
    *part_of("reward.rewards", "reward_funcs", "reward_weights", "reward_model_name_or_path", "repetition_n_grams",
             "repetition_max_penalty"),
    *part_of("algorithm.shaping.overlong", "max_completion_len", "soft_punish_cache"),
    *part_of("algorithm.correction", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
             "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
             "use_vllm"),
    *part_of("model.dtype", "bf16", "torch_dtype", "dtype"),
    Rule("reward_clip_range", "algorithm.shaping.clip", "", given),
    Rule("num_iterations", "algorithm.epochs"),
    Rule("max_steps", "iterations", "optimizer steps / steps per iteration; -1: num_train_epochs counts", steps),
    Rule("mask_truncated_completions", "algorithm.shaping.truncation_mask"),
    Rule("entropy_coef", "algorithm.entropy_coef", "", given),
    *lost("only the tokens with the highest entropy are trained there", "top_entropy_quantile", unless=(None, 1)),
    *lost("the coefficient of the entropy is constant here", "use_adaptive_entropy", unless=(None, False)),
    *lost("the coefficient of the entropy is constant here", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
          "entropy_target", off=_without("use_adaptive_entropy")),
    *lost("no mask of sequences with a high divergence; see algorithm.correction", "off_policy_mask_threshold"),
    Rule("sync_ref_model", "algorithm.kl.renew_interval", "ref_model_sync_steps / steps per iteration", reference),
    *part_of("algorithm.kl.renew_interval", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *idle("read with loss_type: vespo", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    Rule("temperature", "rollout.temperature"),
    *lost("samples are drawn from the whole distribution, so that the learner has the sampler's probabilities", "top_p",
          unless=(None, 1)),
    *lost("samples are drawn from the whole distribution, so that the learner has the sampler's probabilities", "top_k",
          unless=(None, 0, -1)),
    *lost("samples are drawn from the whole distribution, so that the learner has the sampler's probabilities", "min_p",
          unless=(None, 0)),
    *lost("no penalty of repetition in sampling", "repetition_penalty", unless=(None, 1)),
    *lost("no other options of sampling", "generation_kwargs", "generation_kwargs.*"),
    *lost("no grammar of answers", "vllm_guided_decoding_regex", "vllm_structured_outputs_regex"),
    *part_of("environment.file", "tools", "environment_factory", "rollout_func"),
    *part_of("environment.max_turns", "max_tool_calling_iterations"),
    Rule("learning_rate", "trainer.optimizer.lr"),
    Rule("lr_scheduler_type", "trainer.optimizer.schedule", "", schedule("lr_scheduler_kwargs")),
    Rule("lr_scheduler_type", "trainer.optimizer.min_lr", "with lr_scheduler_kwargs", minimum("learning_rate", _min_ratio)),
    *part_of("trainer.optimizer.min_lr", "lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.min_lr_rate",
             "lr_scheduler_kwargs.power"),
    *lost("no such option of the schedule", "lr_scheduler_kwargs.*", "lr_scheduler_kwargs"),
    Rule("warmup_ratio", "trainer.optimizer.warmup", "a part of the run",
         unless_given("warmup_steps", warmup_ratio("lr_scheduler_type"))),
    Rule("warmup_steps", "trainer.optimizer.warmup", "", warmup_steps),
    Rule("optim", "trainer.optimizer", "", _optimizer),
    *lost("arguments of the optimizer", "optim_args"),
    Rule("weight_decay", "trainer.optimizer.weight_decay"),
    Rule("adam_beta1", "trainer.optimizer.beta1"),
    Rule("adam_beta2", "trainer.optimizer.beta2"),
    Rule("adam_epsilon", "trainer.optimizer.eps"),
    Rule("max_grad_norm", "trainer.optimizer.clip_grad"),
    *lost("noise on embeddings", "neftune_noise_alpha"),
    *lost("bfloat16 is used here", "fp16", unless=(None, False)),
    Rule("router_aux_loss_coef", "trainer.moe.aux_loss_coef", "", given),
    *idle("models have no dropout here", "disable_dropout"),
    *idle("the numbers of the last layer are float32 here, too", "cast_lm_head_to_fp32"),
    Rule("seed", "seed"),
    Rule("data_seed", "data.shuffle_seed", "", given),
    *idle("a run has the same bits again by default", "full_determinism"),
    Rule("shuffle_dataset", "data.shuffle"),
    *idle("rows keep every column, which rewards can read", "remove_unused_columns"),
    Rule("use_peft", "trainer.lora", "with lora_r and lora_alpha",
         lambda value, values: adapters("lora_alpha", 32)(values.get("lora_r", 16), values)
         if value else Off("all weights are trained")),
    *part_of("trainer.lora", "lora_r", "lora_alpha"),
    Rule("use_rslora", "trainer.lora.rslora", "", when("use_peft")),
    Rule("lora_target_modules", "trainer.lora.targets", "", _targets),
    *lost("adapters have no dropout here", "lora_dropout", unless=(None, 0), off=_without("use_peft")),
    *lost("adapters are on linear layers alone", "lora_modules_to_save", "lora_target_parameters", off=_without("use_peft")),
    *lost("adapters are those of LoRA", "use_dora", unless=(None, False), off=_without("use_peft")),
    *idle("the task of an adapter's file", "lora_task_type", "peft_config.inference_mode"),
    *idle("adapters start from the run's seed; see trainer.recompute", "peft_config.random_state",
          "peft_config.use_gradient_checkpointing", "peft_config.max_seq_length"),
    *lost("adapters start at zero", "peft_config.loftq_config"),
    *lost("adapters start at zero", "peft_config.init_lora_weights", unless=(None, True)),
    *lost("adapters have no biases of their own", "peft_config.bias", unless=(None, "none")),
    *lost("no such option of adapters", "peft_config.*"),
    *lost("weights are not quantised here", "load_in_4bit", "load_in_8bit", unless=(None, False)),
    *idle("read with load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
          "bnb_4bit_compute_dtype"),
    Rule("vllm_tensor_parallel_size", "rollout.tensor_parallel"),
    Rule("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    Rule("vllm_mode", "placement", "colocate: colocated, server: separate",
         choice("a vllm_mode", {"colocate": "colocated", "server": "separate"})),
    *idle("the length follows from those of prompt and completion", "vllm_max_model_length", "vllm_max_model_len"),
    *idle("replicas are processes or machines of their own", "vllm_device", "vllm_dtype", "vllm_enable_sleep_mode",
          "vllm_model_impl", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
          "vllm_group_port", "vllm_enable_prefix_caching", "use_transformers_paged", "use_transformers_continuous_batching",
          "transformers_continuous_batching_config", "transformers_continuous_batching_config.*", "cache_implementation",
          "ds3_gather_for_generation", "pad_to_multiple_of"),
    Rule("gradient_checkpointing", "trainer.recompute", "true: full", lambda value, _: "full" if value else Off()),
    *idle("see trainer.recompute", "gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.*"),
    Rule("save_steps", "trainer.save_interval", "optimizer steps / steps per iteration", _when_strategy("save_strategy")),
    Rule("save_total_limit", "trainer.keep_checkpoints", "", given),
    Rule("eval_steps", "eval_interval", "optimizer steps / steps per iteration", _when_strategy("eval_strategy")),
    *part_of("trainer.save_interval", "save_strategy"),
    *part_of("eval_interval", "eval_strategy"),
    Rule("num_generations_eval", "eval_answers", "one answer is greedy, several are sampled", above(0)),
    *idle("an evaluation sends all its prompts at once", "per_device_eval_batch_size", "eval_accumulation_steps"),
    *idle("set data.eval; an evaluation is before the first iteration and after the last", "do_eval", "eval_on_start",
          "eval_delay", "evaluation_strategy"),
    *idle("the last checkpoint is always saved and exported", "save_only_model", "save_safetensors", "do_train",
          "save_on_each_node"),
    *lost("the last weights are the result; those of the best evaluation are beside them in hf/best", "load_best_model_at_end",
          unless=(None, False)),
    *idle("see eval_best", "metric_for_best_model", "greater_is_better"),
    Rule("report_to", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    Rule("run_name", "name", "lower-case letters, digits and hyphens", name),
    Rule("output_dir", "output_dir", "", path),
    *idle("an existing run needs --resume or --fork", "overwrite_output_dir", "resume_from_checkpoint", "ignore_data_skip"),
    *idle("every iteration is logged, samples too", "logging_*", "log_*", "num_completions_to_print", "wandb_*", "trackio_*",
          "project", "disable_tqdm", "include_num_input_tokens_seen", "include_tokens_per_second"),
    *idle("nothing is uploaded", "hub_*", "push_to_hub*", "overwrite_hub_revision"),
    *idle("how the weights and tensors are read and computed", "attn_implementation", "model_init_kwargs",
          "model_init_kwargs.*", "trust_remote_code", "tf32", "torch_compile*", "use_liger_loss", "use_liger_kernel",
          "liger_kernel_config*", "use_cache", "tokenizer_name_or_path", "model_code_revision", "use_cpu",
          "torch_empty_cache_steps"),
    *idle("how the ranks share memory and compute", "deepspeed", "deepspeed.*", "fsdp", "fsdp_config", "fsdp_config.*", "ddp_*",
          "dataloader_*", "local_rank", "accelerator_config*", "average_tokens_across_devices", "gradient_as_bucket_view",
          "compute_environment", "debug", "distributed_type", "deepspeed_config.*", "machine_rank", "main_training_function",
          "mixed_precision", "num_machines", "rdzv_backend", "same_network", "tpu_*", "main_process_port", "config_file",
          "env.*"),
    *idle("after the training", "benchmarks", "callbacks", "do_predict"),
    *idle("not read by GRPO and RLOO", "auto_find_batch_size", "label_smoothing_factor", "length_column_name",
          "train_sampling_strategy", "prediction_loss_only", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval",
          "eval_do_concat_batches", "eval_use_gather_object", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint",
          "skip_memory_metrics"),
    *idle("where open-r1 runs programs; here reward.rewards.N.options of `code`", "code_provider", "code_language",
          "e2b_router_url", "morph_router_url", "ioi_provider", "parallel_code_exec_per_proc", "code_eval_test_batch_size"),
    *idle("options of a reward that is a placeholder", "cosine_*"),
    *lost("a key of another trainer", *OTHERS, another_run=True),
    *idle("a deprecated, unused option", "ignore_bias_buffers"),
)  # fmt: skip

DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "epsilon": 0.2,
    "scale_rewards": "group",
    "num_train_epochs": 3,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "seed": 42,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "save_steps": 500,
    "gradient_checkpointing": True,
}

TRL = System("trl", "TRL", RULES, DEFAULTS, fixed, epochs="num_train_epochs", environment=environment)


def with_plain_options(values: Values) -> dict[str, object]:
    """The values under the keys of the rules: options that are text are read, and `no_` is removed."""
    found: dict[str, object] = {}
    for key, value in values.items():
        positive = key.removeprefix("no_")
        if key != positive and value is True and TRL.rules_of(positive):
            found[positive] = False
        elif isinstance(value, str) and value.lstrip().startswith("{") and key.endswith("_kwargs"):
            found |= dict(flatten(value_of(value), key))
        elif key in ("eval_strategy", "save_strategy") and value is False:  # YAML reads no as false
            found[key] = "no"
        else:
            found[key] = value
    return found


def refuse_others(values: Values) -> None:
    """Raises ConfigError for the values of a trainer that is a stage here, or of an older trainer."""
    for key, (title, what) in OTHERS.items():
        if key in values:
            raise ConfigError("GRPOConfig or RLOOConfig", f"{title} ({key})", what)
    if values.get("loss_type") in DPO_LOSSES:
        raise ConfigError("GRPOConfig or RLOOConfig", f"DPOConfig (loss_type {values['loss_type']})", DPO)


def trainer_of(origin: str) -> str | None:
    """`grpo` or `rloo`, if the name of a file or program says so."""
    match = re.search(r"(?<![a-z])(grpo|rloo)(?![a-z])", origin.lower())
    return match[1] if match else None
