"""The fate of verl's keys of data, model and actor.

Invariant: a pattern with `*` says "no effect on training" only where that is true of every key below it.
"""

import re

from polyreme.import_config.convert import NAME_OR_PATH, adapters, lookup, path, paths, when
from polyreme.import_config.rules import PART, Lost, Off, Rule, Values, idle, lost, part_of
from polyreme.import_config.verl.algorithm import ACTOR, clip_ratio, kl_loss_type
from polyreme.import_config.verl.engine_keys import MEGATRON
from polyreme.import_config.verl.optimizer import schedule

ROLLOUT, MODEL, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.ref"
GAE = when("algorithm.adv_estimator", "gae")
_SENSES = re.compile(r"[\d.-]vl\b|\bvl[\d.-]|internvl|llava|omni|vision|-\d\.?\d?v\b|minicpm-[ov]", re.IGNORECASE)
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
NO_CRITIC = "no critic without adv_estimator: gae"


def without_critic(values: Values) -> str:
    """Why a key of the critic has no effect; empty where there is a critic."""
    return "" if values["algorithm.adv_estimator"] == "gae" else NO_CRITIC


def _targets(value: object, values: Values) -> object:
    names = value if isinstance(value, list) else [value]
    if value in (None, "all-linear") or not (values.get(f"{MODEL}.lora_rank") or values.get(f"{MODEL}.lora.rank")):
        return Off("all linear layers, or no adapters")
    return names if set(names) <= LAYERS else Lost(f"layers are {', '.join(sorted(LAYERS))} here")


def _truncation(value: object, values: Values) -> object:
    if value == "error" or values["data.filter_overlong_prompts"]:
        return PART
    return Lost("verl cuts long prompts; here they are left out")


def _micro(value: int, values: Values) -> object:
    if values.get(f"{ACTOR}.use_dynamic_bsz"):
        return Off("ppo_max_token_len_per_gpu bounds with use_dynamic_bsz")
    return value * (values["data.max_prompt_length"] + values["data.max_response_length"]) if value else Off("not set")


def _scale(value: object, values: Values) -> object:
    used = values[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    if value in (None, values["data.max_response_length"]) or not used:
        return Off("max_response_length is the divisor here, or the mode has none")
    return Lost("the divisor is max_response_length here: scale the learning rate instead")


def _is_of_text(values: Values) -> str:
    """Why a column of images has no effect; empty for a model whose name says that it reads images or sound."""
    return "" if _SENSES.search(str(values[f"{MODEL}.path"])) else "the model reads texts"


def _seeded(value: object, values: Values) -> object:
    return Off("null: the run's seed") if value is None else value


DATA = (
    Rule("data.train_files", "data.train", "", paths),
    Rule("data.val_files", "data.eval", "", paths),
    Rule("data.prompt_key", "data.prompt_key"),
    Rule("data.max_prompt_length", "data.max_prompt_tokens"),
    Rule("data.max_response_length", "rollout.max_new_tokens"),
    Rule("data.train_batch_size", "groups_per_iteration", "prompts per iteration in both", lambda value, _: value or PART),
    Rule("data.shuffle", "data.shuffle"),
    Rule("data.seed", "data.shuffle_seed", "", _seeded),
    *part_of("data.overlong", "data.filter_overlong_prompts"),
    Rule("data.truncation", "data.overlong", "", _truncation),
    *lost("name a part of the rows with `split` in data.train", "data.train_max_samples", unless=(None, -1)),
    Rule("data.val_max_samples", "eval_samples", "", lambda value, _: value if value and value > 0 else Off("all rows")),
    *lost("rows are read by their columns; write the rows that this class makes into a file", "data.custom_cls.*",
          "data.datagen.*"),
    *lost("prompts are in a random order, or in that of the file", "data.sampler.*", unless=(None, False, 0)),
    *lost("the chat template has no options here; write them into the template", "data.apply_chat_template_kwargs.*"),
    *lost("the tokenizer is in model.path", "data.tokenizer", f"{MODEL}.tokenizer_path"),
    *lost("set reward.choose_by to this column", "data.reward_fn_key", unless=(None, "data_source")),
    *idle("generation goes on until a batch is full", "data.gen_batch_size"),
    *idle("evaluation only: it sends all its prompts at once", "data.val_batch_size", "data.validation_shuffle"),
    *lost("images, audio and video are not read: prompts are texts", "data.image_key", "data.video_key", "data.audio_key",
          another_run=True, off=_is_of_text),
    *idle("only used with images", "data.image_patch_size", "data.mm_processor_kwargs*", "data.return_multi_modal_inputs"),
    *idle("what a row holds in memory", "data.return_raw_input_ids", "data.return_raw_chat", "data.return_full_prompt",
          "data.use_shm", "data.dataloader_num_workers", "data.filter_overlong_prompts_workers", "data.trust_remote_code",
          "data.cache_dir"),
)  # fmt: skip

MODELS = (
    Rule(f"{MODEL}.path", "model.path", NAME_OR_PATH, path),
    Rule(f"{MODEL}.enable_gradient_checkpointing", "trainer.recompute", "true: full", lookup({True: "full"}, False, None)),
    Rule(f"{MODEL}.lora_rank", "trainer.lora", "0: all weights are trained", adapters(f"{MODEL}.lora_alpha", 16)),
    *part_of("trainer.lora", f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha"),
    Rule(f"{MODEL}.lora.rank", "trainer.lora", "0: all weights are trained", adapters(f"{MODEL}.lora.alpha", 32)),
    Rule(f"{MODEL}.target_modules", "trainer.lora.targets", "", _targets),
    *lost("adapters have Hugging Face's layer names in trainer.lora.targets; null: all linear layers",
          f"{MODEL}.lora.target_modules", unless=(None, ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
          off=lambda values: "" if values.get(f"{MODEL}.lora.rank") else "no adapters"),
    *lost("see trainer.lora", f"{MODEL}.exclude_modules", f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path",
          f"{MODEL}.lora.exclude_modules", f"{MODEL}.lora.dropout", unless=(None, [], 0, "")),
    *lost("see trainer.lora", f"{MODEL}.lora.*", unless=(None,),
          off=lambda values: "" if values.get(f"{MODEL}.lora.rank") else "no adapters"),
    *idle("how adapters are stored", f"{MODEL}.lora.type", f"{MODEL}.lora.merge", f"{MODEL}.lora.a2a_experimental",
          f"{MODEL}.lora.dtype"),
    *lost("the model is as its config.json says", f"{MODEL}.override_config.*", unless=(None, False, 0, 0.0)),
    *idle("kernels", f"{MODEL}.override_config.attn_implementation", f"{MODEL}.use_liger", f"{MODEL}.use_fused_kernels",
          f"{MODEL}.fused_kernel_options.*", f"{MODEL}.tiled_mlp.*", f"{MODEL}.use_remove_padding",
          f"{MODEL}.enable_activation_offload", f"{MODEL}.use_shm", f"{MODEL}.trust_remote_code", f"{MODEL}.hf_config_path"),
    *lost("no external code changes the model", f"{MODEL}.external_lib"),
    *lost("put the template into the model's tokenizer files", f"{MODEL}.custom_chat_template"),
    *lost("no multi-token prediction is trained", f"{MODEL}.mtp.enable", f"{MODEL}.mtp.enable_train", unless=(None, False)),
    *idle("only used with mtp.enable", f"{MODEL}.mtp.*"),
)  # fmt: skip


def optimizer_keys(section: str, target: str) -> tuple[Rule, ...]:
    """The fates of the keys of an optimizer; `optimizer.optimizer` computes its settings."""
    names = (
        "lr",
        "weight_decay",
        "betas",
        "lr_warmup_steps",
        "lr_warmup_steps_ratio",
        "min_lr",
        "min_lr_ratio",
        "clip_grad",
        "lr_min",
        "min_lr_factor",
        "eps",
    )
    shaped = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")
    optim, off = f"{section}.optim", None if section == ACTOR else without_critic

    def constant(values: Values) -> str:
        styles = [values.get(f"{optim}.{each}") for each in shaped]
        return "the rate is constant" if set(styles) <= {None, "constant"} else off(values) if off else ""

    return (
        *part_of(target, *(f"{optim}.{each}" for each in names), f"{section}.grad_clip"),
        *(Rule(f"{optim}.{each}", f"{target}.schedule", "", schedule) for each in shaped),
        *lost("the optimizer is AdamW", f"{optim}.optimizer", f"{optim}.name", unless=(None, "AdamW", "adamw", "adam", "Adam"),
              off=off),
        *lost("the optimizer is torch's AdamW", f"{optim}.optimizer_impl", unless=(None, "torch.optim"), off=off),
        *lost("a cosine schedule falls once", f"{optim}.num_cycles", unless=(None, 0.5), off=constant),
        *lost("the warm-up starts at 0", f"{optim}.lr_warmup_init", f"{optim}.lr_start", unless=(None, 0), off=off),
        *lost("the rate falls until the last iteration", f"{optim}.lr_decay_ratio", unless=(None, 1), off=constant),
        *lost("moments and gradients are float32", f"{optim}.use_precision_aware_optimizer", unless=(None, False), off=off),
        *idle("only used with use_precision_aware_optimizer", f"{optim}.main_grads_dtype", f"{optim}.exp_avg*_dtype"),
        *idle("only used with optimizer: muon", f"{optim}.muon_*"),
        *idle("how the ranks share the optimizer", f"{optim}.use_layer_wise_distributed_optimizer"),
        *lost("the rate falls until the last iteration", f"{optim}.lr_decay_steps", off=constant),
        *lost("the weight decay is constant", f"{optim}.weight_decay_incr_style", unless=(None, "constant"), off=off),
        *lost("no such schedule", f"{optim}.lr_wsd_*", unless=(None, "exponential"), off=off),
        *lost("see trainer.optimizer", f"{optim}.override_optimizer_config", f"{optim}.override_optimizer_config.*", off=off),
        Rule(f"{optim}.override_optimizer_config.optimizer_cpu_offload", "trainer.offload.optimizer", "",
             lookup({True: True}, False)),
        *idle("memory of the optimizer", *(f"{optim}.override_optimizer_config.{each}" for each in (
            "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"))),
        *idle("set by verl, or of a resume", f"{optim}.total_training_steps", f"{optim}.use_checkpoint_opt_param_scheduler",
              f"{optim}.zero_indexed_step"),
    )  # fmt: skip


ACTORS = (
    *optimizer_keys(ACTOR, "trainer.optimizer"),
    *part_of("algorithm.minibatches", f"{ACTOR}.ppo_mini_batch_size"),
    Rule(f"{ACTOR}.ppo_epochs", "algorithm.epochs"),
    Rule(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", "x (prompt + response length)", _micro),
    *idle("micro-batches are bounded by trainer.micro_batch_tokens", f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.use_dynamic_bsz"),
    Rule(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", "with use_dynamic_bsz",
         when(f"{ACTOR}.use_dynamic_bsz")),
    Rule(f"{ACTOR}.clip_ratio", "algorithm.loss", "", clip_ratio),
    *part_of("algorithm.loss",
             *(f"{ACTOR}.{each}" for each in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")),
             f"{ACTOR}.policy_loss.loss_mode"),
    *idle("only used by losses that are refused", *(f"{ACTOR}.policy_loss.{each}" for each in (
        "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"))),
    *part_of("algorithm.aggregation", f"{ACTOR}.loss_agg_mode"),
    Rule(f"{ACTOR}.loss_scale_factor", "algorithm.aggregation", "", _scale),
    Rule(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef"),
    *part_of("algorithm.kl", f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
    Rule(f"{ACTOR}.kl_loss_type", "algorithm.kl", "", kl_loss_type),
    *part_of("algorithm.anchor", f"{ACTOR}.use_rollout_log_probs"),
    *part_of("algorithm.correction", f"{ACTOR}.tis_imp_ratio_cap"),
    *lost("a mini-batch consists of whole groups; verl mixes the samples of groups", f"{ACTOR}.shuffle", unless=(None, False)),
    *lost("a run starts from the weights of model.path", f"{ACTOR}.load_weight", f"{ACTOR}.megatron.load_weight",
          unless=(None, True)),
    Rule(f"{ACTOR}.router_replay.mode", "trainer.moe.replay_routes", "R3: the replica's choice",
         lookup({"R3": True}, "disabled", None)),
    *idle("files of recorded routes", f"{ACTOR}.router_replay.record_file", f"{ACTOR}.router_replay.replay_file"),
    *lost("no training with simulated quantization", f"{ACTOR}.qat.enable", f"{ACTOR}.fsdp_config.qat.enable",
          unless=(None, False)),
    *idle("only used with qat.enable", f"{ACTOR}.qat.*", f"{ACTOR}.fsdp_config.qat.*"),
    *part_of("trainer.parallel", f"{ACTOR}.strategy", f"{ACTOR}.ulysses_sequence_parallel_size", "model_engine"),
    *part_of("algorithm.aggregation", f"{ACTOR}.use_token_level_loss"),
    *idle("kernels, memory and what is measured", *(f"{ACTOR}.{each}" for each in (
        "use_torch_compile", "use_fused_kernels", "use_remove_padding", "use_prefix_grouper", "entropy_from_logits_with_chunking",
        "entropy_from_logits_chunk_size", "entropy_checkpointing", "pad_to_length", "calculate_entropy",
        "calculate_sum_pi_squared", "data_loader_seed", "rollout_n", "freeze_vision_tower", "profile.*"))),
    Rule(f"{ACTOR}.fsdp_config.optimizer_offload", "trainer.offload.optimizer"),
    Rule(f"{ACTOR}.fsdp_config.param_offload", "trainer.offload.idle_models", "models that do not compute are on the host"),
    *lost("weights have full precision in the optimizer", f"{ACTOR}.fsdp_config.model_dtype", unless=(None, "fp32", "float32")),
    *lost("the learner computes in bfloat16", f"{ACTOR}.fsdp_config.dtype", f"{MEGATRON}.dtype",
          unless=(None, "bfloat16", "bf16")),
    *lost("see model.dtype", f"{ACTOR}.fsdp_config.mixed_precision.*", unless=(None, "bf16", "bfloat16", "fp32", "float32")),
    *idle("how FSDP shards and prefetches", *(f"{ACTOR}.fsdp_config.{each}" for each in (
        "wrap_policy.*", "offload_policy", "reshard_after_forward", "fsdp_size", "forward_prefetch", "use_orig_params", "seed",
        "full_determinism", "ulysses_sequence_parallel_size", "entropy_*", "use_torch_compile", "strategy", "forward_only",
        "pad_to_length*", "use_no_sync_for_gradient_accumulation", "turbo_config.*", "grad_offload"))),
)  # fmt: skip
