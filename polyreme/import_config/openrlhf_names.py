"""The names of OpenRLHF's options since 0.10.2, by their flat names before.

Invariant: every flat name has one dotted name, or several where one option has become one of the actor and one of the critic.
"""

from polyreme.import_config.rules import Values

_SAME = {
    "actor": ["actor.num_nodes", "actor.num_gpus_per_node", "actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip",
              "actor.policy_loss_type", "actor.aux_loss_coef", "actor.freeze_visual_encoder"],
    "data": ["data.input_key", "data.label_key", "data.input_template", "data.apply_chat_template", "data.max_len",
             "data.max_samples", "data.prompt_max_len", "data.image_key", "data.max_images_per_prompt",
             "data.disable_fast_tokenizer", "data.dataloader_num_workers", "data.prompt_split"],
    "rollout": ["rollout.max_new_tokens", "rollout.n_samples_per_prompt", "rollout.temperature", "rollout.top_p",
                "rollout.vllm_generate_batch_size"],
    "train": ["train.num_episodes", "train.max_epochs", "train.seed", "train.enable_ema", "train.ema_beta",
              "train.agent_func_path", "train.async_queue_size", "train.colocate_actor_ref", "train.colocate_critic_reward"],
    "critic": ["critic.value_clip", "critic.save_value_network"],
    "reward": ["reward.overlong_buffer_len", "reward.overlong_penalty_factor", "reward.stop_properly_penalty_coef"],
    "vllm": ["vllm.enforce_eager", "vllm.enable_prefix_caching"],
    "ds": ["ds.zero_stage", "ds.param_dtype", "ds.bf16", "ds.packing_samples", "ds.adam_offload", "ds.ring_attn_size",
           "ds.attn_implementation", "ds.zpg", "ds.deepcompile", "ds.use_liger_kernel", "ds.grad_accum_dtype", "ds.overlap_comm",
           "ds.load_in_4bit", "ds.value_head_prefix", "ds.flash_attn"],
    "ckpt": ["ckpt.save_steps", "ckpt.best_metric_key"],
    "logger": ["logger.logging_steps"],
}  # fmt: skip
"""Dotted names whose flat name is the last part."""
_PREFIXED = {
    f"{part}_{name}": f"{part}.{name}"
    for part, names in {
        "vllm": [
            "num_engines",
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "enable_sleep",
            "sync_backend",
            "sync_with_ray",
        ],
        "critic": ["num_nodes", "num_gpus_per_node"],
        "ref": ["num_nodes", "num_gpus_per_node"],
        "reward": ["num_nodes", "num_gpus_per_node", "clip_range"],
        "eval": ["dataset", "split", "steps", "temperature", "n_samples_per_prompt"],
    }.items()
    for name in names
}
RENAMED = {
    **{name.rpartition(".")[2]: name for names in _SAME.values() for name in names},
    **_PREFIXED,
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "sft_model_path": "actor.model_name_or_path",
    "reward_model_path": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "generate_max_len": "rollout.max_new_tokens",
    "rollout_batch_size": "rollout.batch_size",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "full_determinism": "train.full_determinism_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "entropy_loss_coef": "actor.entropy_coef",
    "freezing_actor_steps": "critic.freezing_steps",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "use_icepop": "algo.advantage.use_icepop",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "use_kl_estimator_k3": "algo.kl.use_k3",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "colocate_all_models": "train.colocate_all",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "fsdp2_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "async_train": "train.async_enable",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "save_hf_model": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
}
"""The dotted name of each flat one."""
SHARED = ("actor.adam.betas", "actor.adam.weight_decay", "actor.max_norm", "actor.lr_scheduler", "actor.lr_warmup_ratio")
"""Dotted names of the options that were common to actor and critic while names were flat."""
FLAT_DEFAULTS = {"data.prompt_max_len": 1024, "rollout.max_new_tokens": 1024}
"""Defaults of the versions with flat names, up to 0.9, for options whose later default is another."""


def with_dotted_names(values: Values) -> dict[str, object]:
    """The values under the dotted names, with what flat names imply for the critic and the lengths."""
    dotted = {RENAMED.get(key, key): value for key, value in values.items()}
    if any(key in RENAMED for key in values):
        critic = dotted.get("algo.advantage.estimator", "gae") == "gae"
        common = {name.replace("actor.", "critic.", 1): dotted[name] for name in SHARED if name in dotted and critic}
        lengths = {} if "data.max_len" in dotted else FLAT_DEFAULTS
        dotted = {**lengths, **common, **dotted}
    return dotted
