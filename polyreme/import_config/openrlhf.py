"""OpenRLHF: the command line of `train_ppo_ray`, with the flat names up to 0.10.1 or the dotted names since.

Keys and defaults: openrlhf/cli/train_ppo_ray.py.

Invariant: the tables below are the only place that knows the fate of OpenRLHF's options. The rules have the dotted names.
"""

from polyreme.import_config.convert import NAME_OR_PATH, above, adapters, choice, given, of_name, overlong, path, positive, when
from polyreme.import_config.hugging_face import minimum, schedule, warmup_ratio
from polyreme.import_config.openrlhf_parts import PER_GROUP, PRESETS, environment, fixed
from polyreme.import_config.rules import Convert, Lost, Noted, Off, Rule, System, Unresolved, Values, idle, lost, part_of

ESTIMATOR = "algo.advantage.estimator"
IN_GAE = when(ESTIMATOR, "gae")
_DIRECTORY = "CHECK: what stands behind @ is the data set's only directory that OpenRLHF reads: name its files"


def _only(convert: Convert) -> Convert:
    """A conversion for the critic, which only gae has."""
    return lambda value, values: convert(value, values) if values[ESTIMATOR] == "gae" else Off("only gae has a critic")


def _betas(value: object, values: Values) -> object:
    return {"beta1": value[0], "beta2": value[1]} if isinstance(value, list) and len(value) == 2 else Lost("not two numbers")


def _bounds(value: object, values: Values) -> object:
    if value is None:
        return Off("eps_clip")
    return {"low": value[0], "high": value[1]} if isinstance(value, list) and len(value) == 2 else Lost("not two numbers")


def _datasets(value: object, values: Values) -> object:
    """One data set, or several with their probabilities."""
    found = _weighted(_names(value), values)
    return Noted(found, _DIRECTORY) if "@" in str(value) and not isinstance(value, Unresolved) else found


def _held_out(value: object, values: Values) -> object:
    found = [path(name, values) for name in _names(value)]
    return found[0] if len(found) == 1 else found


def _names(value: object) -> list[str]:
    return [str(value)] if isinstance(value, Unresolved) else [each.partition("@")[0].strip() for each in str(value).split(",")]


def _weighted(names: list[str], values: Values) -> object:
    if len(names) == 1:
        return path(names[0], values)
    given_weights = values.get("data.prompt_probs")
    known = given_weights and not isinstance(given_weights, Unresolved)
    weights = [float(each) for each in str(given_weights).split(",")] if known else []
    if len(weights) != len(names):
        return [path(name, values) for name in names]
    return [{"path": path(name, values), "weight": weight} for name, weight in zip(names, weights, strict=True)]


def _clip_range(value: list[float], values: Values) -> object:
    if values[ESTIMATOR] not in PER_GROUP:
        return value
    if value[0] <= -10 and value[1] >= 10:
        return Off("clips the compared scores, which are hardly ever beyond 10")
    return Lost("OpenRLHF clips the scores after the comparison of the group, which has no counterpart")


def _filters(value: object, values: Values) -> object:
    if not value or values[ESTIMATOR] in PER_GROUP:
        return bool(value)
    return Lost("groups are filtered only for estimators that compare their samples: this one learns from equal scores, too")


def _whiten(value: object, values: Values) -> object:
    if not value or values[ESTIMATOR] in ("group_norm", "dr_grpo", "rloo"):
        return Off("advantages are not normalised over the batch with this estimator")
    if values[ESTIMATOR] == "reinforce_baseline":
        return Noted(False, "CHECK: OpenRLHF still subtracts the mean over the batch's tokens")
    return Lost("subtracting the batch's mean without dividing by its deviation: advantages are whitened here")


def _normalise(value: object, values: Values) -> object:
    if not value or values.get("reward.remote_url") or values.get("train.agent_func_path"):
        return Off("only with a reward model that OpenRLHF loads")
    return Noted(
        True, "CHECK: by the running moments of the run's scores; OpenRLHF has those that are stored with the reward model"
    )


def _shrinks(value: object, values: Values) -> object:
    if value is None or value == 1:
        return Off("off")
    return Lost(
        "the score of a truncated response is multiplied, or replaced if negative; see algorithm.shaping.truncation_penalty"
    )


def _staleness(value: object, values: Values) -> object:
    return Noted(values.get("train.async_queue_size", 1), "async_queue_size") if value else Off("off: samples are on-policy")


def _targets(value: object, values: Values) -> object:
    names = value if isinstance(value, list) else [value]
    if names == ["all-linear"] or not values.get("ds.lora.rank"):
        return Off("all linear layers")
    known = [name for name in names if name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
    return known if len(known) == len(names) else Lost("no such linear layers here; adapters are on all")


RULES = (
    Rule("actor.model_name_or_path", "model.path", NAME_OR_PATH, path),
    Rule("critic.model_name_or_path", "trainer.critic.path", NAME_OR_PATH, _only(path)),
    Rule("data.prompt_dataset", "data.train", NAME_OR_PATH, _datasets),
    *part_of("data.train", "data.prompt_probs"),
    Rule("eval.dataset", "data.eval", NAME_OR_PATH, _held_out),
    Rule("data.input_key", "data.prompt_key"),
    Rule("data.label_key", "data.label_key"),
    *lost("OpenRLHF takes at most so many rows; make such a file if the data has more, and count it in --rows",
          "data.max_samples", unless=(None, 100_000_000)),
    Rule("data.prompt_split", "data.split", "", of_name("data.prompt_dataset", "train")),
    *idle("only evaluation reads it; give data.eval as a source with this split, or name a file", "eval.split"),
    *lost("prompts are not put into such a template here: put them into it in the data, with data.template: none",
          "data.input_template"),
    *part_of("data.template", "data.apply_chat_template"),
    *part_of("data.max_prompt_tokens", "data.prompt_max_len", "data.max_len"),
    *part_of("rollout.max_new_tokens", "rollout.max_new_tokens"),
    *idle("read only with max_images_per_prompt", "data.image_key"),
    *lost("models of images are not trained here", "data.max_images_per_prompt", unless=(None, 0), another_run=True),
    *lost("models of images are not trained here", "actor.freeze_visual_encoder", unless=(None, False)),
    *idle("the model's tokenizer.json is read", "data.disable_fast_tokenizer"),
    *idle("prompts are encoded once, before the first iteration", "data.dataloader_num_workers"),
    *lost("set algorithm.ptx with data, coef and batch_size", "pretrain_data"),
    *lost("set algorithm.ptx with data, coef and batch_size", "ptx_coef",
          off=lambda values: "" if values.get("pretrain_data") else "only with pretrain_data"),
    *idle("read with pretrain_data", "pretrain_data_probs", "pretrain_split"),
    Rule("rollout.batch_size", "groups_per_iteration", "prompts per iteration in both"),
    Rule("rollout.n_samples_per_prompt", "group_size"),
    *part_of("algorithm.minibatches", "train.batch_size"),
    Rule("rollout.temperature", "rollout.temperature"),
    *lost("samples are drawn from the whole distribution, so that the learner has the sampler's probabilities", "rollout.top_p",
          unless=(None, 1)),
    *idle("how many prompts are under way at once", "rollout.vllm_generate_batch_size"),
    *idle("micro-batches are bounded by trainer.micro_batch_tokens", "rollout.micro_batch_size", "rollout.max_tokens_per_gpu",
          "train.micro_batch_size", "train.dynamic_batch_enable"),
    Rule("train.max_tokens_per_gpu", "trainer.micro_batch_tokens"),
    Rule("train.max_epochs", "algorithm.epochs"),
    *part_of("iterations", "train.num_episodes"),
    Rule("train.seed", "seed"),
    *idle("a run has the same bits again by default", "train.full_determinism_enable"),
    Rule("train.enable_ema", "trainer.ema_decay", "with ema_beta. CHECK: per iteration here, per optimizer step there",
         lambda value, values: values.get("train.ema_beta", 0.992) if value else Off()),
    *part_of("trainer.ema_decay", "train.ema_beta"),
    Rule("train.async_enable", "max_staleness", "in iterations", _staleness),
    *part_of("max_staleness", "train.async_queue_size"),
    *lost("see rollout.tokens_per_iteration, which pauses long responses and continues them with new weights",
          "train.partial_rollout_enable", unless=(None, False)),
    Rule("train.colocate_all", "placement", "true: colocated; async_enable needs separate",
         lambda value, values: "colocated" if value and not values.get("train.async_enable") else Off("separate devices")),
    *idle("all roles share the learner's ranks", "train.colocate_actor_ref", "train.colocate_critic_reward"),
    *part_of("environment.file", "train.agent_func_path"),
    *part_of("trainer.parallel.data", "actor.num_nodes", "actor.num_gpus_per_node"),
    *(rule for role in ("actor", "critic") for rule in (
        Rule(f"{role}.optim", f"trainer.{'critic.' * (role == 'critic')}optimizer", "adam",
             choice("an optimizer", {}, "adam") if role == "actor" else _only(choice("an optimizer", {}, "adam"))),
        *idle("only read with optim: muon", f"{role}.muon.lr", f"{role}.muon.momentum", f"{role}.muon.ns_steps",
              f"{role}.muon.nesterov", f"{role}.muon.no_nesterov"))),
    Rule("actor.adam.lr", "trainer.optimizer.lr"),
    Rule("actor.adam.betas", "trainer.optimizer", "", _betas),
    Rule("actor.adam.eps", "trainer.optimizer.eps"),
    Rule("actor.adam.weight_decay", "trainer.optimizer.weight_decay"),
    Rule("actor.max_norm", "trainer.optimizer.clip_grad"),
    Rule("actor.lr_scheduler", "trainer.optimizer.schedule", "", schedule()),
    Rule("actor.lr_scheduler", "trainer.optimizer.min_lr", "with min_lr_ratio: a part of lr",
         minimum("actor.adam.lr", lambda values: values["actor.min_lr_ratio"])),
    *part_of("trainer.optimizer.min_lr", "actor.min_lr_ratio"),
    Rule("actor.lr_warmup_ratio", "trainer.optimizer.warmup", "a part of the run", warmup_ratio("actor.lr_scheduler")),
    Rule("critic.adam.lr", "trainer.critic.optimizer.lr", "", IN_GAE),
    Rule("critic.adam.betas", "trainer.critic.optimizer", "", _only(_betas)),
    Rule("critic.adam.eps", "trainer.critic.optimizer.eps", "", IN_GAE),
    Rule("critic.adam.weight_decay", "trainer.critic.optimizer.weight_decay", "", IN_GAE),
    Rule("critic.max_norm", "trainer.critic.optimizer.clip_grad", "", IN_GAE),
    Rule("critic.lr_scheduler", "trainer.critic.optimizer.schedule", "", _only(schedule())),
    Rule("critic.lr_scheduler", "trainer.critic.optimizer.min_lr", "with min_lr_ratio: a part of lr",
         _only(minimum("critic.adam.lr", lambda values: values["critic.min_lr_ratio"]))),
    *part_of("trainer.critic.optimizer.min_lr", "critic.min_lr_ratio"),
    Rule("critic.lr_warmup_ratio", "trainer.critic.optimizer.warmup", "a part of the run",
         _only(warmup_ratio("critic.lr_scheduler"))),
    Rule("critic.value_clip", "algorithm.advantage.value_clip", "", IN_GAE),
    Rule("critic.freezing_steps", "trainer.critic.warmup_iterations", "", _only(above(0))),
    *idle("the critic is part of every checkpoint", "critic.save_value_network"),
    *idle("roles share the learner's ranks", "critic.num_nodes", "critic.num_gpus_per_node", "ref.num_nodes",
          "ref.num_gpus_per_node", "reward.num_nodes", "reward.num_gpus_per_node"),
    *idle("where models are kept; see trainer.offload", "ref.offload", "reward.offload", "ref_reward_offload",
          "actor_init_on_gpu", "ds.enable_sleep", "vllm.enable_sleep"),
    Rule("actor.eps_clip", "algorithm.loss", "both bounds", lambda value, _: {"low": value, "high": value}),
    Rule("actor.eps_clip_low_high", "algorithm.loss", "", _bounds),
    Rule("actor.dual_clip", "algorithm.loss.dual", "", given),
    Rule("actor.policy_loss_type", "algorithm.loss.ratio", "gspo: one ratio per response",
         choice("a policy loss", {"ppo": "token", "gspo": "sequence"})),
    *part_of("algorithm.aggregation", "actor.loss_agg_mode"),
    Rule("actor.entropy_coef", "algorithm.entropy_coef", "", given),
    Rule("actor.aux_loss_coef", "trainer.moe.aux_loss_coef", "0: none", above(0)),
    Rule("actor.gradient_checkpointing_enable", "trainer.recompute", "true: full", lambda value, _: "full" if value else Off()),
    *idle("see trainer.recompute", "actor.gradient_checkpointing_reentrant"),
    Rule(ESTIMATOR, "algorithm.preset", "", choice("an advantage estimator", PRESETS)),
    Rule(ESTIMATOR, "algorithm.advantage.std_floor", "group_norm: OpenRLHF's",
         lambda value, _: 1e-9 if value == "group_norm" else Off()),
    Rule("algo.advantage.gamma", "algorithm.advantage.gamma", "only in gae and reinforce, as in OpenRLHF",
         when(ESTIMATOR, "gae", "reinforce")),
    Rule("algo.advantage.lambd", "algorithm.advantage.lam", "", IN_GAE),
    Rule("algo.advantage.no_std_norm", "algorithm.advantage.whiten", "", _whiten),
    *part_of("algorithm.correction", "algo.advantage.is_correction_level", "algo.advantage.is_correction_mode",
             "algo.advantage.is_correction_gating", "algo.advantage.is_correction_threshold",
             "algo.advantage.is_correction_enable", "algo.advantage.is_correction_type", "algo.advantage.use_icepop"),
    *part_of("algorithm.kl", "algo.kl.init_coef", "algo.kl.use_loss", "algo.kl.estimator", "algo.kl.unbiased_gradient",
             "algo.kl.target", "algo.kl.horizon", "algo.kl.use_k3"),
    Rule("algo.dynamic_filtering_enable", "algorithm.dynamic_sampling", "", _filters),
    *lost("groups are dropped if their scores are equal, not if their mean is outside a range", "algo.dynamic_filtering_range",
          unless=(None, [0, 1]),
          off=lambda values: "" if values.get("algo.dynamic_filtering_enable") else "dynamic filtering is off"),
    Rule("reward.normalize_enable", "algorithm.shaping.normalise", "", _normalise),
    Rule("reward.clip_range", "algorithm.shaping.clip", "", _clip_range),
    *part_of("reward.rewards", "reward.model_name_or_path", "reward.remote_url"),
    Rule("reward.overlong_buffer_len", "algorithm.shaping.overlong", "/ rollout.max_new_tokens, with overlong_penalty_factor",
         overlong("reward.overlong_buffer_len", "rollout.max_new_tokens", "reward.overlong_penalty_factor")),
    *part_of("algorithm.shaping.overlong", "reward.overlong_penalty_factor"),
    Rule("reward.stop_properly_penalty_coef", "algorithm.shaping", "", _shrinks),
    Rule("vllm.num_engines", "rollout.replicas", "", given),
    Rule("vllm.tensor_parallel_size", "rollout.tensor_parallel"),
    Rule("vllm.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    *idle("how weights get to the engines", "vllm.sync_backend", "vllm.sync_with_ray"),
    *idle("an option of the engine's speed", "vllm.enforce_eager", "vllm.enable_prefix_caching"),
    Rule("ds.tensor_parallel_size", "trainer.parallel.tensor"),
    Rule("ds.ring_attn_size", "trainer.parallel.context", "ranks that share a sequence"),
    *idle("how heads are divided in ring attention", "ds.ring_attn_head_stride"),
    Rule("ds.lora.rank", "trainer.lora", "0: all weights are trained", adapters("ds.lora.alpha", 16)),
    *part_of("trainer.lora", "ds.lora.alpha"),
    Rule("ds.lora.target_modules", "trainer.lora.targets", "", _targets),
    *lost("adapters have no dropout here", "ds.lora.dropout", unless=(None, 0)),
    *lost("weights are not quantised here", "ds.load_in_4bit", unless=(None, False)),
    Rule("ds.param_dtype", "model.dtype", "", lambda value, _: "bfloat16" if value == "bf16" else Lost("bfloat16 is used here")),
    Rule("ds.bf16", "model.dtype", "", lambda value, _: "bfloat16" if value else Off("param_dtype")),
    Rule("ds.adam_offload", "trainer.offload.optimizer"),
    *idle("the learner is Megatron-Core, not DeepSpeed: how its ranks share memory and compute", "ds.zero_stage", "ds.zpg",
          "ds.deepcompile", "ds.overlap_comm", "ds.packing_samples", "ds.attn_implementation", "ds.flash_attn",
          "ds.use_liger_kernel", "ds.experts_implementation", "ds.use_universal_ckpt", "torch_compile", "local_rank",
          "ds.grad_accum_dtype"),
    *idle("the name of the value head in a reward model's file; it is found by its shape", "ds.value_head_prefix"),
    Rule("ckpt.save_steps", "trainer.save_interval", "-1: only after the last iteration", positive),
    Rule("ckpt.max_num", "trainer.keep_checkpoints"),
    Rule("ckpt.path", "output_dir", "", path),
    *idle("set eval_best: SET/METRIC", "ckpt.best_metric_key"),
    *idle("every checkpoint is resumable, and the last is exported for Hugging Face", "ckpt.output_dir", "ckpt.save_hf",
          "ckpt.disable_ds", "ckpt.max_mem", "ckpt.load_enable"),
    Rule("eval.steps", "eval_interval", "-1: only before the first iteration and after the last", positive),
    Rule("eval.n_samples_per_prompt", "eval_answers", "one answer is greedy, several are sampled"),
    Rule("eval.temperature", "eval_temperature", "of several answers", above(0)),
    Rule("logger.wandb.key", "trackers", "the key comes from WANDB_API_KEY",
         lambda value, _: [{"kind": "wandb"}] if value else Off()),
    *idle("metrics.jsonl and TensorBoard are always written", "logger.wandb.org", "logger.wandb.group", "logger.wandb.project",
          "logger.wandb.run_name", "logger.tensorboard_dir", "logger.logging_steps", "perf"),
    *idle("nothing is downloaded", "use_ms"),
)  # fmt: skip

DEFAULTS = {
    "data.input_key": "input",
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "rollout.n_samples_per_prompt": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "train.max_tokens_per_gpu": 16192,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    **{f"{role}.{key}": value for role in ("actor", "critic") for key, value in {
        "adam.betas": [0.9, 0.95],
        "adam.weight_decay": 0.0,
        "max_norm": 1.0,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.03,
        "min_lr_ratio": 0.1,
    }.items()},
    "critic.value_clip": 0.5,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.advantage.is_correction_level": "off",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "reward.clip_range": [-10, 10],
    "ds.param_dtype": "bf16",
}  # fmt: skip

OPENRLHF = System("openrlhf", "OpenRLHF", RULES, DEFAULTS, fixed, epochs="train.num_episodes", environment=environment)
