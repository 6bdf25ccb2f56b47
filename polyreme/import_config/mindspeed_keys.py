"""The fate of each of MindSpeed RL's keys.

Invariant: a pattern with `*` says "no effect on training" only where that is true of every key below it.
"""

from polyreme.import_config.convert import KL, above, lookup, path, positive, when
from polyreme.import_config.rules import PART, WHOLE, Lost, Off, Rule, Values, idle, lost, one_of, part_of, unless_off

TRAIN, ACTOR, CRITIC, RL, GENERATE = "megatron_training", "actor_config", "critic_config", "rl_config", "generate_config"
SAMPLING = f"{GENERATE}.sampling_config"
GAE = when(f"{RL}.adv_estimator", "gae")
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
OPTIMIZER: dict[str, tuple[str, object]] = {
    "lr": ("lr", 1e-6),
    "min_lr": ("min_lr", 0.0),
    "lr_decay_style": ("schedule", "linear"),
    "lr_warmup_fraction": ("warmup", None),
    "weight_decay": ("weight_decay", 0.01),
    "clip_grad": ("clip_grad", 1.0),
    "adam_beta1": ("beta1", 0.9),
    "adam_beta2": ("beta2", 0.999),
}
"""Our key and MindSpeed RL's default for each key of an optimizer."""
LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
EXPERTS = ("a3b", "a22b", "deepseek", "moe")
"""Parts of the names of models with experts."""


_schedule = one_of(SCHEDULES)


def _without_critic(values: Values) -> str:
    return "" if values[f"{RL}.adv_estimator"] == "gae" else "no critic without adv_estimator: gae"


def _one_turn(values: Values) -> str:
    return "" if values.get(f"{RL}.multi_turn_enable") else "only used with multi_turn_enable"


def _kl_penalty(value: str, values: Values) -> object:
    used = values[f"{RL}.init_kl_coef"] and values.get(f"{TRAIN}.stage") != "ray_dapo" and values[f"{RL}.adv_estimator"] != "gae"
    if used and not values[f"{RL}.use_kl_in_reward"] and KL.get(value) == "k1":
        return Lost(
            "kl in the loss has no gradient in expectation, so it is left out; algorithm.kl with k3 or k1+ is usually meant"
        )
    return PART


def _lora_layers(value: list[str] | None, values: Values) -> object:
    if not values.get(f"{TRAIN}.lora_r"):
        return Off("no adapters")
    return PART if set(value or LAYERS) == LAYERS else Lost("name the layers as Hugging Face does in trainer.lora.targets")


def _model_files(value: object, values: Values) -> object:
    if any(part in str(value).lower() for part in EXPERTS):
        return Lost("CHECK: MindSpeed RL's file of this model may have moe_aux_loss_coeff (0.001 if not): see trainer.moe")
    return Off("the model's architecture is in its config.json")


TRAINS = (
    Rule("defaults", "trainer.moe", "", _model_files),
    Rule(f"{TRAIN}.tokenizer_name_or_path", "model.path", "CHECK: a Hugging Face directory with weights on this machine", path),
    *part_of("groups_per_iteration", f"{TRAIN}.global_batch_size"),
    Rule(f"{TRAIN}.train_iters", "iterations"),
    Rule(f"{TRAIN}.save_interval", "trainer.save_interval", "", positive),
    Rule(f"{TRAIN}.seed", "seed"),
    Rule(f"{TRAIN}.data_path", "data.train", "CHECK: the prefix of the processed files", path),
    Rule(f"{TRAIN}.no_shuffle", "data.shuffle", "the negation", lambda value, _: not value),
    *lost("name a source with `split` in data.train and data.eval", f"{TRAIN}.split", unless=(None, "100,0,0")),
    *part_of("algorithm.preset", f"{TRAIN}.stage"),
    *part_of("data.label_key", f"{TRAIN}.dataset_additional_keys"),
    Rule(f"{TRAIN}.lora_r", "trainer.lora", "0: all weights are trained",
         lambda rank, values: {"rank": rank, "alpha": values.get(f"{TRAIN}.lora_alpha", 32)} if rank else Off("no adapters")),
    *part_of("trainer.lora", f"{TRAIN}.lora_alpha"),
    Rule(f"{TRAIN}.lora_target_modules", "trainer.lora", "", _lora_layers),
    Rule(f"{TRAIN}.swap_optimizer", "trainer.offload.optimizer"),
    *lost("there is no dropout", *(f"{section}.{name}_dropout" for section in (TRAIN, ACTOR) for name in ("attention", "hidden")),
          unless=(None, 0)),
    *lost("models of text alone", f"{TRAIN}.mm_model", f"{TRAIN}.is_multimodal", f"{RL}.is_multimodal", unless=(None, False)),
    *lost("the reference is the policy before training", f"{TRAIN}.ref_model", unless=(None, "")),
    *lost("this run trains", f"{TRAIN}.skip_train", unless=(None, False)),
    *lost("the optimizer is AdamW", *(f"{section}.optimizer" for section in (TRAIN, ACTOR)), unless=(None, "adam")),
    *(
        rule
        for section in (TRAIN, ACTOR)
        for rule in (
            Rule(f"{section}.moe_aux_loss_coeff", "trainer.moe.aux_loss_coef", "0: none", above(0)),
            Rule(f"{section}.moe_z_loss_coeff", "trainer.moe.z_loss_coef", "0: none", above(0)),
            *idle("Megatron's and Ascend's kernels, memory, storage and logs", *(f"{section}.{name}" for name in (
                "model", "use_*", "no_*", "attention_softmax_in_fp32", "bf16", "sequence_parallel", "tokenizer_type",
                "tokenizer_*", "seq_length", "init_method_std", "distributed_backend", "variable_seq_lengths",
                "full_shuffle_instruction_dataset", "reset_position_ids", "reset_attention_mask", "shape_order",
                "moe_alltoall_overlap_comm", "moe_permutation_async_comm", "norm_epsilon", "coc_*", "lora_fusion",
                "lora_ckpt_filter", "gemm_gradient_accumulation_fusion", "context_parallel_algo", "attention_mask_type",
                "num_layer_list", "num_layers_per_virtual_pipeline_stage", "recompute_method", "recompute_num_layers",
                "recompute_activation_function", "recompute_in_*", "initial_loss_scale", "finetune", "swap_attention",
                "overlap_*", "accumulate_allreduce_grads_in_fp32", "reuse_fp32_param", "log_*", "num_workers", "eval_*",
                "dataloader_type", "pad_to_multiple_of", "enable_high_availability", "npu_deterministic", "prompt_type",
                "prompt_type_path", "ddp_bucket_size", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_tp_extend_ep",
                "load_checkpoint_loosely", "vocab_extra_ids", "schedules_method", "dualpipev_*", "ai_framework",
                "pretrained_checkpoint", "virtual_pipeline_model_parallel_size"))),
        )
    ),
)  # fmt: skip

ACTORS = (
    *part_of("trainer.optimizer", *(f"{ACTOR}.{key}" for key in OPTIMIZER if key != "lr_decay_style")),
    Rule(f"{ACTOR}.lr_decay_style", "trainer.optimizer.schedule", "", _schedule),
    Rule(f"{ACTOR}.tensor_model_parallel_size", "trainer.parallel.tensor"),
    Rule(f"{ACTOR}.pipeline_model_parallel_size", "trainer.parallel.pipeline", "every stage has equally many layers"),
    Rule(f"{ACTOR}.context_parallel_size", "trainer.parallel.context"),
    *part_of("trainer.parallel.expert", f"{ACTOR}.expert_model_parallel_size"),
    Rule(f"{ACTOR}.recompute_granularity", "trainer.recompute", "selective: the activations inside each MLP",
         lookup({"selective": "selective", "full": "full"}, None)),
    Rule(f"{ACTOR}.micro_batch_size", "trainer.micro_batch_tokens", "x (max_prompt_length + max_tokens)",
         lambda value, values: Off("packing sizes bound, with use_dynamic_bsz") if values.get(f"{RL}.use_dynamic_bsz")
         else value * (values[f"{RL}.max_prompt_length"] + values[f"{SAMPLING}.max_tokens"])),
    *idle("a Megatron checkpoint: `polyreme convert` makes a Hugging Face directory for model.path", f"{ACTOR}.load"),
    *idle("checkpoints are in output_dir/name", f"{ACTOR}.save"),
    *part_of("trainer.critic.optimizer", *(f"{CRITIC}.{key}" for key in OPTIMIZER if key != "lr_decay_style")),
    Rule(f"{CRITIC}.lr_decay_style", "trainer.critic.optimizer.schedule", "", unless_off(_without_critic, _schedule)),
    *idle("with the actor's; in MindSpeed RL a path equal to the actor's mixes the files of both, which `polyreme convert`"
          " refuses",
          f"{CRITIC}.save"),
    *lost("CHECK: convert it with `polyreme convert --critic` and set trainer.critic.path; without, the critic starts from the"
          " actor",
          f"{CRITIC}.load", off=_without_critic),
    *idle("the critic shares the actor's ranks and micro-batches", *(f"{CRITIC}.{name}" for name in (
        "model", "*_parallel_size", "micro_batch_size", "finetune", "no_*", "num_layer_list", "recompute_*", "initial_loss_scale",
        "moe_tp_extend_ep", "context_parallel_algo", "sequence_parallel", "use_*"))),
    *idle("the reference shares the actor's ranks and starts from its weights", "ref_config.*"),
    *idle("a reward model is a process of the reward service", "reward_config.*"),
)  # fmt: skip

LEARNING = (
    Rule(f"{RL}.n_samples_per_prompt", "group_size"),
    *part_of("algorithm.minibatches", f"{RL}.mini_batch_size"),
    Rule(f"{RL}.epochs", "algorithm.epochs"),
    *part_of("algorithm.loss",
             *(f"{RL}.{key}" for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_higher_enable"))),
    *part_of("algorithm.aggregation", f"{RL}.token_level_loss"),
    Rule(f"{RL}.cliprange_value", "algorithm.advantage.value_clip", "", GAE),
    Rule(f"{RL}.entropy_coeff", "algorithm.entropy_coef"),
    Rule(f"{RL}.gamma", "algorithm.advantage.gamma", "", GAE),
    Rule(f"{RL}.lam", "algorithm.advantage.lam", "", GAE),
    *part_of("algorithm.advantage.whiten", f"{RL}.advantage_whiten"),
    *part_of("algorithm.preset", f"{RL}.adv_estimator"),
    Rule(f"{RL}.kl_penalty", "algorithm.kl", "", _kl_penalty),
    *part_of("algorithm.kl", f"{RL}.init_kl_coef", f"{RL}.use_kl_in_reward"),
    *idle("adaptive never takes effect in MindSpeed RL; here it is algorithm.kl.adaptive", f"{RL}.kl_ctrl_type",
          f"{RL}.kl_horizon", f"{RL}.kl_target"),
    Rule(f"{RL}.max_prompt_length", "data.max_prompt_tokens"),
    *part_of("reward.rewards", f"{RL}.verifier_function", f"{RL}.verifier_weight", f"{RL}.rule_reward"),
    *lost("set the weights of the rewards", f"{RL}.beta", unless=(None, 0.1)),
    *part_of("algorithm.dynamic_sampling", f"{RL}.filter_groups_enable"),
    *part_of("groups_per_iteration", f"{RL}.filter_groups_train_batch_size"),
    *idle("groups are filtered by their scores, without a limit of batches", f"{RL}.filter_groups_metric",
          f"{RL}.filter_groups_max_batches"),
    *part_of("algorithm.shaping.overlong", f"{RL}.overlong_buffer*", f"{RL}.rollout_max_tokens"),
    *lost("a mini-batch consists of whole groups; MindSpeed RL mixes the samples of groups", f"{RL}.shuffle_mini_batch",
          unless=(None, False)),
    *part_of("environment.file", f"{RL}.multi_turn_enable", f"{RL}.tool_config_path"),
    *part_of("environment.max_turns", f"{RL}.max_tool_calls"),
    *part_of("rollout.max_model_len", f"{RL}.max_total_response_length"),
    *lost("a longer message is a failure here (environment.max_message_chars): cut it in the environment",
          f"{RL}.max_tool_response_length", f"{RL}.tool_response_truncate_side", off=_one_turn),
    *lost("the environment reads the calls in an answer, and answers them", f"{RL}.max_parallel_calls",
          f"{RL}.tool_parser_format", f"{RL}.multi_turn_*", off=_one_turn),
    *part_of("trainer.parallel.data", f"{RL}.actor_resource.num_npus"),
    *idle("all roles share the learner's ranks", f"{RL}.*_resource.*", f"{RL}.*_resource"),
    Rule(f"{RL}.use_wandb", "trackers", "", lambda value, _: [{"kind": "wandb"}] if value else Off("no wandb")),
    Rule(f"{RL}.use_swanlab", "trackers", "", lambda value, _: [{"kind": "swanlab"}] if value else Off("no swanlab")),
    *idle("TensorBoard files are always written", f"{RL}.use_tensorboard"),
    Rule(f"{RL}.partial_rollout_max_split", "rollout.tokens_per_iteration", "max_tokens / partial_rollout_max_split",
         lambda value, values: -(-values[f"{SAMPLING}.max_tokens"] // value) if value > 1 else Off("no partial rollouts")),
    *(Rule(f"{RL}.{key}", "trainer.micro_batch_tokens", "with use_dynamic_bsz", when(f"{RL}.use_dynamic_bsz")) for key in (
        "max_packing_token_size", "actor_max_packing_token_size", "update_max_packing_token_size")),
    *idle("MindSpeed RL's workers, queues and logs", *(f"{RL}.{key}" for key in (
        "blocking", "guarantee_order", "use_integrated_worker", "*_forward_micro_batch_size", "*_dispatch_size", "num_cpus_for_*",
        "use_remove_padding", "use_dynamic_bsz", "use_dp_batch_balance", "log_max_throughput", "share_backbone", "async_engine",
        "verifier_parallel", "verifier_timeout", "num_samples_per_step", "enable_sharding_validate", "tp_split_expert",
        "colocate_*", "wandb_*", "swanlab_*", "runtime_env_path", "ref_max_packing_token_size", "reward_max_packing_token_size",
        "update_micro_batch_size", "zmq_communication", "integrated_mode_config", "reuse_image_embeds"))),
)  # fmt: skip

GENERATION = (
    Rule(f"{GENERATE}.infer_tensor_parallel_size", "rollout.tensor_parallel"),
    Rule(f"{GENERATE}.max_num_seqs", "rollout.max_num_seqs"),
    *part_of("rollout.max_model_len", f"{GENERATE}.max_model_len"),
    Rule(f"{GENERATE}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    *part_of("model.dtype", f"{GENERATE}.dtype"),
    Rule(f"{GENERATE}.offload_train_optimizer", "trainer.offload.optimizer"),
    Rule(f"{GENERATE}.offload_train_param", "trainer.offload.idle_models", "models that do not compute are on the host"),
    *idle("gradients have one buffer, which generation does not need", f"{GENERATE}.offload_train_grad"),
    Rule(f"{SAMPLING}.max_tokens", "rollout.max_new_tokens"),
    Rule(f"{SAMPLING}.temperature", "rollout.temperature"),
    *part_of("seed", f"{SAMPLING}.seed"),
    *lost(WHOLE, f"{SAMPLING}.top_p", unless=(None, 1)),
    *lost(WHOLE, f"{SAMPLING}.top_k", unless=(None, -1, 0)),
    *lost(WHOLE, f"{SAMPLING}.min_p", unless=(None, 0)),
    *lost(WHOLE, f"{SAMPLING}.repetition_penalty", unless=(None, 1)),
    *lost(WHOLE, f"{SAMPLING}.presence_penalty", f"{SAMPLING}.frequency_penalty", unless=(None, 0)),
    *idle("what the engine returns", f"{SAMPLING}.logprobs", f"{SAMPLING}.detokenize", f"{SAMPLING}.n", f"{SAMPLING}.best_of",
          f"{SAMPLING}.num_completions"),
    *lost("replicas have the learner's weights", f"{GENERATE}.quantization"),
    *idle("speed and memory of generation", *(f"{GENERATE}.{key}" for key in (
        "trust_remote_code", "tokenizer_name_or_path", "infer_pipeline_parallel_size", "infer_expert_parallel_size",
        "data_parallel_size", "max_num_batched_tokens", "enforce_eager", "torchair_graph", "enable_expert_parallel",
        "enable_prefix_caching", "num_scheduler_steps", "micro_batch_size", "expert_map_path", "ascend_scheduler_config_enabled",
        "use_tqdm", "enable_sleep_mode"))),
)  # fmt: skip

RULES = (*TRAINS, *ACTORS, *LEARNING, *GENERATION)
