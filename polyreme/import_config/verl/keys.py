"""The fate of verl's other keys: generation, critic, algorithm, rewards, trainer; and all of them together.

Invariant: a pattern with `*` says "no effect on training" only where that is true of every key below it.
"""

from polyreme.import_config.convert import NAME_OR_PATH, given, lookup, name, path, positive, trackers, when
from polyreme.import_config.rules import PART, WHOLE, Convert, Lost, Noted, Off, Rule, Values, idle, lost, part_of
from polyreme.import_config.verl.actor_keys import (
    ACTORS,
    DATA,
    GAE,
    MODEL,
    MODELS,
    NO_CRITIC,
    REF,
    ROLLOUT,
    optimizer_keys,
    without_critic,
)
from polyreme.import_config.verl.algorithm import (
    ACTOR,
    CORRECTION,
    DISTILLATION,
    MODE,
    filter_metric,
    importance,
    kl_in_reward,
    rejection,
)
from polyreme.import_config.verl.engine_keys import ENGINES
from polyreme.import_config.verl.turns import MULTI_TURNS

V1 = "trainer.v1"


def _answers(value: object, values: Values) -> object:
    sampled = value == 1 and values.get(f"{ROLLOUT}.val_kwargs.do_sample")
    return Noted(value, "CHECK: verl samples this one (val_kwargs.do_sample)") if sampled else value


def _evaluated(value: object, values: Values) -> object:
    cut = [
        f"{key} {values[name]}"
        for key in ("top_p", "top_k")
        if values.get(name := f"{ROLLOUT}.val_kwargs.{key}") not in (None, 1, -1, 0)
    ]
    if not isinstance(value, int | float) or value <= 0:
        return Off("greedy")
    return Noted(value, f"CHECK: with {', '.join(cut)} in verl, from the whole distribution here") if cut else value


def _fitting(key: str) -> Convert:
    """The fate of a critic's key that must agree with the actor's `key`."""

    def convert(value: object, values: Values) -> object:
        same = value is None or (value or None) == (values.get(key) or None)
        return (
            Off(f"as {key}, or no critic") if same or without_critic(values) else Lost(f"the critic has the actor's {key} here")
        )

    return convert


def _model_options(value: object, values: Values) -> object:
    enabled = values.get("reward_model.enable")
    return (
        (Lost("the reward function asks this model itself") if values.get("custom_reward_function.path") else PART)
        if enabled
        else Off()
    )


def _config_name(value: object, values: Values) -> object:
    name = str(value).removesuffix(".yaml")
    own = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "fully_async_ppo_trainer")
    if name in (*own, "fully_async_ppo_megatron_trainer"):
        return PART
    return Lost("CHECK: the values of this file are not here; import it, too. Its name may say several turns or tools")


ROLLOUTS = (
    Rule(f"{ROLLOUT}.n", "group_size"),
    Rule(f"{ROLLOUT}.temperature", "rollout.temperature"),
    *lost(WHOLE, f"{ROLLOUT}.top_p", unless=(None, 1)),
    *lost(WHOLE, f"{ROLLOUT}.top_k", unless=(None, -1, 0)),
    *lost(WHOLE, f"{ROLLOUT}.do_sample", unless=(None, True)),
    *lost("a response ends at the end token", f"{ROLLOUT}.ignore_eos", unless=(None, False)),
    *lost("every sample of a batch is trained", f"{ROLLOUT}.over_sample_rate", unless=(None, 0)),
    *lost("replicas have the learner's weights", f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"),
    *MULTI_TURNS,
    *lost("the engine is vLLM", f"{ROLLOUT}.agent.custom_async_server.*"),
    Rule(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel"),
    Rule(f"{ROLLOUT}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    Rule(f"{ROLLOUT}.max_num_seqs", "rollout.max_num_seqs"),
    *part_of("rollout.max_model_len", f"{ROLLOUT}.max_model_len", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"),
    *part_of("rollout.replicas", f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"),
    Rule(f"{ROLLOUT}.name", "rollout.engine", "",
         lambda value, _: Noted("vllm", "" if value == "vllm" else "vLLM generates here")),
    Rule(f"{ROLLOUT}.dtype", "model.dtype", "", lookup({"bfloat16": "bfloat16", "float32": "float32"})),
    Rule(f"{ROLLOUT}.enable_rollout_routing_replay", "trainer.moe.replay_routes"),
    Rule(f"{ROLLOUT}.val_kwargs.n", "eval_answers", "one answer is greedy, several are sampled", _answers),
    Rule(f"{ROLLOUT}.val_kwargs.temperature", "eval_temperature", "of several answers", _evaluated),
    *idle("evaluation only: one answer is greedy, several are drawn from the whole distribution", f"{ROLLOUT}.val_kwargs.*"),
    *idle("speed and memory of generation", *(f"{ROLLOUT}.{each}" for each in (
        "mode", "log_prob_*", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "max_num_batched_tokens",
        "disable_log_stats", "multi_stage_wake_up", "enable_chunked_prefill", "enable_prefix_caching", "load_format",
        "layered_summon", "scheduling_policy", "calculate_log_probs", "logprobs_mode", "agent.num_workers",
        "update_weights_bucket_megabytes", "checkpoint_engine.*", "trace.*", "router_config_path", "skip_dump_dir",
        "skip_tokenizer_init", "prometheus.*", "data_parallel_size", "expert_parallel_size", "seed",
        "pipeline_model_parallel_size", "full_determinism", "layer_name_map.*", "disaggregation.*",
        "moe_load_balance_metrics_interval", "engine_kwargs.vllm.disable_*", "engine_kwargs.sglang.attention_backend",
        "engine_kwargs.*.swap_space", "mtp", "qat"))),
)  # fmt: skip

REFERENCES = (
    *idle("the reference is not trained", f"{REF}.optim.*"),
    *lost("the reference is the policy before training", f"{REF}.model", f"{REF}.model.*"),
    *idle("the reference shares the learner's ranks and micro-batches", *(f"{REF}.{each}" for each in (
        "fsdp_config.*", "megatron.*", "log_prob_*", "strategy", "ulysses_*", "use_torch_compile", "entropy_*", "pad_to_length*",
        "rollout_n", "router_replay.*", "load_weight"))),
    *part_of("placement", "actor_rollout_ref.hybrid_engine"),
    *idle("a timeout", "actor_rollout_ref.nccl_timeout"),
)  # fmt: skip

CRITICS = (
    *optimizer_keys("critic", "trainer.critic.optimizer"),
    Rule("critic.model.path", "trainer.critic.path", NAME_OR_PATH,
         lambda value, values: Off(NO_CRITIC) if without_critic(values) else path(value, values)),
    Rule("critic.cliprange_value", "algorithm.advantage.value_clip", "", GAE),
    Rule("critic.ppo_mini_batch_size", "algorithm.minibatches", "", _fitting(f"{ACTOR}.ppo_mini_batch_size")),
    Rule("critic.ppo_epochs", "algorithm.epochs", "", _fitting(f"{ACTOR}.ppo_epochs")),
    Rule("critic.loss_agg_mode", "algorithm.aggregation", "", _fitting(f"{ACTOR}.loss_agg_mode")),
    Rule("critic.model.lora_rank", "trainer.lora", "", _fitting(f"{MODEL}.lora_rank")),
    Rule("critic.model.lora.rank", "trainer.lora", "", _fitting(f"{MODEL}.lora.rank")),
    *lost("the critic is as its config.json says", "critic.model.override_config.*", unless=(None, False, 0), off=without_critic),
    *idle("the critic shares the actor's ranks, micro-batches and memory, or there is none", "critic.enable", "critic.strategy",
          "critic.megatron.*", "critic.fsdp.*", "critic.model.*", "critic.ppo_micro_batch_size*",
          "critic.ppo_max_token_len_per_gpu", "critic.forward_*", "critic.use_dynamic_bsz", "critic.ulysses_*",
          "critic.rollout_n", "critic.shuffle", "critic.data_loader_seed", "critic.loss_scale_factor", "critic.load_weight",
          "critic.nccl_timeout"),
)  # fmt: skip

ALGORITHMS = (
    *part_of("algorithm.preset", "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
    Rule("algorithm.gamma", "algorithm.advantage.gamma", "", when("algorithm.adv_estimator", "gae", "reinforce_plus_plus")),
    Rule("algorithm.lam", "algorithm.advantage.lam", "", GAE),
    Rule("algorithm.use_kl_in_reward", "algorithm.kl", "", kl_in_reward),
    *part_of("algorithm.kl", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
    *part_of("algorithm.dynamic_sampling", "algorithm.filter_groups.enable"),
    Rule("algorithm.filter_groups.metric", "algorithm.dynamic_sampling", "", filter_metric),
    *idle("groups are filtered without a limit of batches", "algorithm.filter_groups.max_num_gen_batches",
          "algorithm.filter_groups.max_inflight_gen_batches"),
    *part_of("reward.rewards", "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
    *lost("samples are not resampled by their scores", "algorithm.use_pf_ppo", unless=(None, False)),
    *idle("only used with use_pf_ppo", "algorithm.pf_ppo.*"),
    *part_of("algorithm.anchor", f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout",
             f"{CORRECTION}.loss_type"),
    Rule(f"{CORRECTION}.rollout_is", "algorithm.correction", "", importance),
    Rule(f"{CORRECTION}.rollout_rs", "algorithm.correction", "", rejection),
    *part_of("algorithm.correction", f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_rs_threshold",
             f"{CORRECTION}.rollout_rs_threshold_lower", f"{CORRECTION}.rollout_token_veto_threshold"),
    *lost("weights are not normalised over the batch", f"{CORRECTION}.rollout_is_batch_normalize", unless=(None, False)),
    *lost("the loss is a policy gradient, see loss.kind", f"{CORRECTION}.use_policy_gradient",
          f"{CORRECTION}.use_pure_rollout_correction", unless=(None, False)),
    *lost("an older form of rollout_correction; see algorithm.correction", "algorithm.rollout_is", "algorithm.rollout_is_*",
          unless=(None, False)),
)  # fmt: skip

REWARDS = (
    *part_of("reward.rewards", "custom_reward_function.path", "custom_reward_function.name",
             "custom_reward_function.reward_kwargs.*", "reward_model.model.path", "reward_model.model_path"),
    Rule("reward_model.enable", "reward.rewards", "", _model_options),
    *part_of("algorithm.shaping.overlong", "reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.len",
             "reward_model.overlong_buffer.penalty_factor", "reward_model.reward_kwargs.max_resp_len"),
    *idle("what is logged", "reward_model.overlong_buffer.log"),
    *lost("a reward scores one answer at a time here: write a function of one answer", "reward_model.reward_manager",
          unless=(None, "naive", "prime", "dapo", "gdpo")),
    *lost("set options of the reward", "reward_model.reward_kwargs.*"),
    *lost("code is judged in our own sandbox: the reward `code`", "reward_model.sandbox_fusion.url", "sandbox_fusion.url"),
    *idle("processes and limits of scoring", "reward_model.sandbox_fusion.*", "sandbox_fusion.*",
          "reward_model.launch_reward_fn_async", "reward_model.num_workers", "reward_model.model.*", "reward_model.rollout.*",
          "reward_model.strategy", "reward_model.micro_batch_size*", "reward_model.use_dynamic_bsz", "reward_model.forward_*",
          "reward_model.ulysses_*", "reward_model.n_gpus_per_node", "reward_model.nnodes", "reward_model.enable_resource_pool",
          "reward_model.megatron.*", "reward_model.load_weight", "reward_model.nccl_timeout", "reward_model.inference.*",
          "reward_model.use_reward_loop"),
    *lost("a reward model reads as much as the replica's prompt and answer", "reward_model.max_length"),
    *lost("write the reward as a function of one answer", "reward_model.reward_loop_*", "reward.reward_manager.*",
          "reward_manager.*", unless=(None, "register", "custom_reward_manager")),
)  # fmt: skip

TRAINERS = (
    Rule("trainer.nnodes", "trainer.parallel.nodes"),
    *part_of("trainer.parallel.data and rollout.replicas", "trainer.n_gpus_per_node"),
    Rule("trainer.total_training_steps", "iterations", "", given),
    *part_of("iterations", "trainer.total_epochs"),
    Rule("trainer.save_freq", "trainer.save_interval", "-1: only after the last iteration", positive),
    Rule("trainer.test_freq", "eval_interval", "-1: only before the first iteration and after the last", positive),
    Rule("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints", "", given),
    Rule("trainer.critic_warmup", "trainer.critic.warmup_iterations", "", GAE),
    Rule("trainer.experiment_name", "name", "lower-case letters, digits and hyphens", name),
    *idle("set trackers.0.project", "trainer.project_name"),
    Rule("trainer.logger", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    Rule("trainer.device", "device"),
    Rule("trainer.default_local_dir", "output_dir", "", path),
    *lost("this run trains; `polyreme eval` evaluates", "trainer.val_only", unless=(None, False)),
    *lost("a run starts from model.path; --fork continues one of ours", "trainer.resume_from_path", unless=(None, False)),
    *lost("prompts have one order", "trainer.rejection_sample", "trainer.use_step_wise*", unless=(None, False)),
    *idle("storage, logs and processes", *(f"trainer.{each}" for each in (
        "balance_batch", "log_val_generations", "rollout_data_dir", "validation_data_dir", "esi_redundant_time", "resume_mode",
        "val_before_train", "default_hdfs_dir", "del_local_ckpt_after_load", "max_critic_ckpt_to_keep",
        "ray_wait_register_center_timeout", "use_legacy_worker_impl", "profile_steps", "use_v1", "ray_*",
        "checkpoint_callback_class", "npu_*", "worker_nsight_options.*", "controller_nsight_options.*"))),
    *part_of("placement and max_staleness", MODE, f"{V1}.separate_async.num_warmup_batches",
             f"{V1}.colocate_async.num_warmup_batches"),
    *part_of("algorithm.minibatches", f"{V1}.separate_async.parameter_sync_step"),
    *lost("samples beyond max_staleness are never begun, so none is left out", f"{V1}.sampler.max_off_policy_*",
          off=lambda values: "only used with an asynchronous trainer_mode" if values.get(MODE, "sync") == "sync" else ""),
    *lost("prompts have one order", f"{V1}.sampler.custom_sampler.*", f"{V1}.sampler.sampler_kwargs.*"),
    *idle("how devices are shared, and what follows a failure", f"{V1}.separate_async.hybrid_rollout.*",
          f"{V1}.sampler.sync_refill_failed_groups"),
    *lost("samples of an earlier run are not used again", "skip.*.enable", f"{ROLLOUT}.skip_rollout", unless=(None, False)),
    *idle("only used with skip.*.enable", "skip.*"),
    *idle("there is no Ray: the services are processes", "ray_kwargs.*", "ray_init.*", "ray_wait_register_center_timeout",
          "transfer_queue.*"),
    *idle("metrics have the time of each part of an iteration", "global_profiler.*", "*.profiler.*"),
    *idle("checkpoints have everything for a resume", "*.checkpoint.*"),
    *idle("hydra's own", "*._target_", "hydra.*", "defaults", "config-path"),
    *part_of("groups_per_iteration and max_staleness", *(f"async_training.{each}" for each in (
        "staleness_threshold", "trigger_parameter_sync_step", "require_batches"))),
    *part_of("iterations", "rollout.total_rollout_steps"),
    *part_of("rollout.replicas", "rollout.nnodes", "rollout.n_gpus_per_node"),
    *idle("when evaluations happen", "rollout.total_epochs", "rollout.test_freq"),
    *lost("see rollout.tokens_per_iteration and max_staleness", "async_training.partial_rollout", unless=(None, False)),
    *lost("see max_staleness", "async_training.*"),
    Rule("config-name", "trainer.parallel", "", _config_name),
    *lost("set teacher and algorithm.teacher_coef", f"{DISTILLATION}.*",
          off=lambda values: "" if values.get(f"{DISTILLATION}.enabled") else "only used with distillation.enabled"),
    *part_of("algorithm.teacher_coef", f"{DISTILLATION}.enabled", *(f"{DISTILLATION}.distillation_loss.{each}" for each in (
        "loss_mode", "use_task_rewards", "distillation_loss_coef", "use_policy_gradient"))),
    *idle("devices of the teacher, which is a server of its own", f"{DISTILLATION}.n_gpus_per_node", f"{DISTILLATION}.nnodes",
          f"{DISTILLATION}.*.inference.*", f"{DISTILLATION}.*.num_replicas", f"{DISTILLATION}.*.model_path",
          f"{DISTILLATION}.teacher_key"),
)  # fmt: skip

RULES = (
    *DATA, *MODELS, *ACTORS, *ENGINES, *ROLLOUTS, *REFERENCES, *CRITICS, *ALGORITHMS, *REWARDS, *TRAINERS,
)  # fmt: skip
