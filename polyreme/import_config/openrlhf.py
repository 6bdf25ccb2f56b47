"""OpenRLHF: the command line of `train_ppo_ray`, with the flat names up to 0.10.1 or the dotted names since.

Keys and defaults: openrlhf/cli/train_ppo_ray.py.

Invariant: the tables below are the only place that knows OpenRLHF's options. The rules have the dotted names.
"""

from typing import Any

from polyreme.import_config.convert import above, adapters, lookup, overlong, path, positive, product, ratio
from polyreme.import_config.openrlhf_names import RENAMED
from polyreme.import_config.rules import Off, Rule, System, Values, idle, part_of

PRESETS = {
    "gae": "ppo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
MEMORY = "see trainer.offload; with placement: colocated, replicas and learner leave the devices to each other"


def _gae(value: Any, values: Values) -> Any:
    return value if values["algo.advantage.estimator"] == "gae" else Off()


def _kl(values: Values) -> dict[str, Any] | None:
    if not values["algo.kl.init_coef"]:
        return None
    place = "loss" if values["algo.kl.use_loss"] else "reward"
    kl = {"place": place, "estimator": values["algo.kl.estimator"], "coef": values["algo.kl.init_coef"]}
    if (target := values.get("algo.kl.target")) and place == "reward":
        kl |= {"adaptive": {"target": target, "horizon": int(values.get("algo.kl.horizon", 10000))}}
    return kl


def _reward(values: Values) -> tuple[Any, str]:
    if remote := values.get("reward.remote_url"):
        urls = [path(each, values) for each in str(remote).split(",")]
        if urls[0].endswith(".py"):
            return [{"file": urls[0], "function": "reward_func"}], "reward.remote_url: a Python file"
        return [{"url": urls if len(urls) > 1 else urls[0], "protocol": "openrlhf"}], "reward.remote_url"
    if model := values.get("reward.model_name_or_path"):
        return [{"model": path(model, values)}], "CHECK: reward.model_name_or_path, as a directory on this machine"
    return [{"name": "math"}], "CHECK: the command line names no reward"


def _prompt_tokens(values: Values) -> int:
    return int(
        values.get("data.prompt_max_len") or max(1, values["data.max_len"] - (values.get("rollout.max_new_tokens") or 1024))
    )


def _new_tokens(values: Values) -> int:
    return int(values.get("rollout.max_new_tokens") or max(1, values["data.max_len"] - _prompt_tokens(values)))


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    world = product(values["actor.num_nodes"], values["actor.num_gpus_per_node"])
    samples = product(values["rollout.batch_size"], values["rollout.n_samples_per_prompt"])
    tensor = product(values.get("ds.tensor_parallel_size"))
    fixed: dict[str, tuple[Any, str]] = {
        "device": ("cuda", "OpenRLHF's device"),
        "model.dtype": ("bfloat16", "param_dtype"),
        "reward.rewards": _reward(values),
        "data.max_prompt_tokens": (
            _prompt_tokens(values),
            "prompt_max_len, or max_len - max_new_tokens; longer prompts are left out",
        ),
        "rollout.max_new_tokens": (_new_tokens(values), "max_new_tokens, formerly generate_max_len"),
        "rollout.max_model_len": (_prompt_tokens(values) + _new_tokens(values), "prompt and response"),
        "algorithm.minibatches": (
            min(values["rollout.batch_size"], ratio(samples, values["train.batch_size"])),
            "rollout.batch_size x n_samples_per_prompt / train.batch_size: the latter counts samples, the former prompts",
        ),
        "trainer.parallel.data": (
            ratio(world, tensor),
            "actor.num_nodes x num_gpus_per_node / tensor ranks; ZeRO's ranks are data-parallel here",
        ),
        "data.template": ("chat" if values.get("data.apply_chat_template") else "none", "apply_chat_template"),
    }
    kl = _kl(values)
    for key, value in (kl or {}).items():
        if isinstance(value, dict):
            fixed |= {f"algorithm.kl.{key}.{name}": (each, "kl_target, kl_horizon") for name, each in value.items()}
        else:
            fixed[f"algorithm.kl.{key}"] = (value, "init_kl_coef, kl_estimator, use_kl_loss")
    if kl is None:
        fixed["algorithm.kl"] = (None, "init_kl_coef: 0")
    return fixed


def _betas(value: Any, values: Values) -> Any:
    return {"beta1": value[0], "beta2": value[1]} if isinstance(value, list) and len(value) == 2 else Off()


RULES = (
    Rule("actor.model_name_or_path", "model.path", "CHECK: a directory on this machine, not the name of a repository", path),
    Rule("critic.model_name_or_path", "trainer.critic.path", "CHECK: a directory on this machine",
         lambda value, values: path(value, values) if values["algo.advantage.estimator"] == "gae" else Off()),
    Rule("data.prompt_dataset", "data.train", "CHECK: a file or directory on this machine", path),
    Rule("eval.dataset", "data.eval", "CHECK: a file or directory on this machine", path),
    Rule("data.input_key", "data.prompt_key"),
    Rule("data.label_key", "data.label_key"),
    *idle("list the files in data.train, each with its `weight`", "data.prompt_probs"),
    *idle("name a part of the rows with `split`", "data.max_samples"),
    *idle("name a file, a directory or files with `*` in data.train", "data.prompt_split"),
    *idle("models of text alone", "data.image_key"),
    *idle("models of text alone", "data.max_images_per_prompt"),
    *idle("the model's tokenizer.json is read", "data.disable_fast_tokenizer"),
    *idle("prompts are encoded once, before the first iteration", "data.dataloader_num_workers"),
    *idle("set algorithm.ptx with data, coef and batch_size", "ptx_coef"),
    *idle(MEMORY, "ref_reward_offload"),
    *idle("an option of OpenRLHF's actor", "actor_init_on_gpu"),
    *idle("the learner numbers its ranks", "local_rank"),
    *idle("metrics have the time of each part of an iteration", "perf"),
    *idle("nothing is downloaded", "use_ms"),
    *idle("use data.template: chat, or prompts that are templated", "data.input_template"),
    *part_of("data.template", "data.apply_chat_template"),
    *part_of("data.max_prompt_tokens", "data.prompt_max_len", "data.max_len"),
    *part_of("rollout.max_new_tokens", "rollout.max_new_tokens"),
    Rule("rollout.batch_size", "groups_per_iteration", "prompts per iteration in both"),
    Rule("rollout.n_samples_per_prompt", "group_size"),
    *part_of("algorithm.minibatches", "train.batch_size"),
    Rule("rollout.temperature", "rollout.temperature"),
    *idle("samples are drawn from the whole distribution", "rollout.top_p"),
    Rule("train.max_tokens_per_gpu", "trainer.micro_batch_tokens"),
    *idle("micro-batches are always bounded in tokens", "train.dynamic_batch_enable"),
    *idle("micro-batches are bounded by trainer.micro_batch_tokens", "train.micro_batch_size"),
    Rule("train.max_epochs", "algorithm.epochs"),
    *part_of("iterations", "train.num_episodes"),
    Rule("train.seed", "seed"),
    Rule("train.enable_ema", "trainer.ema_decay", "with ema_beta, per iteration", lambda value, values: values.get("train.ema_beta", 0.992)),
    *part_of("trainer.ema_decay", "train.ema_beta"),
    Rule("train.async_enable", "max_staleness", "true: 1", lambda value, _: 1 if value else Off()),
    Rule("train.colocate_all", "placement", "true: colocated; async_enable needs separate",
         lambda value, values: "colocated" if value and not values.get("train.async_enable") else Off()),
    *idle("there are no tools and further turns", "train.agent_func_path"),
    *idle("roles share the learner's ranks; see placement", "train.*"),
    Rule("actor.adam.lr", "trainer.optimizer.lr"),
    Rule("actor.adam.betas", "trainer.optimizer", "", _betas),
    Rule("actor.adam.weight_decay", "trainer.optimizer.weight_decay"),
    Rule("actor.max_norm", "trainer.optimizer.clip_grad"),
    Rule("actor.lr_scheduler", "trainer.optimizer.schedule", "",
         lookup({"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
                 "cosine_with_min_lr": "cosine"})),
    Rule("actor.lr_scheduler", "trainer.optimizer.min_lr", "cosine_with_min_lr: a tenth of lr",
         lambda value, values: values["actor.adam.lr"] * 0.1 if value == "cosine_with_min_lr" else Off()),
    *idle("set trainer.optimizer.warmup, in iterations", "actor.lr_warmup_ratio"),
    Rule("actor.eps_clip", "algorithm.loss", "both bounds", lambda value, _: {"low": value, "high": value}),
    Rule("actor.eps_clip_low_high", "algorithm.loss", "",
         lambda value, _: {"low": value[0], "high": value[1]} if isinstance(value, list) else Off()),
    Rule("actor.dual_clip", "algorithm.loss.dual"),
    Rule("actor.policy_loss_type", "algorithm.loss.ratio", "gspo: one ratio per response", lookup({"gspo": "sequence"})),
    Rule("actor.entropy_coef", "algorithm.entropy_coef", "", lambda value, _: value or Off()),
    *part_of("trainer.parallel.data", "actor.num_nodes", "actor.num_gpus_per_node"),
    Rule("actor.gradient_checkpointing_enable", "trainer.recompute", "true: full", lookup({True: "full"})),
    *idle("see trainer.recompute", "actor.gradient_checkpointing_*"),
    Rule("actor.aux_loss_coef", "trainer.moe.aux_loss_coef", "0: none", above(0)),
    *idle("an option of OpenRLHF's actor", "actor.*"),
    Rule("critic.adam.lr", "trainer.critic.optimizer.lr", "", _gae),
    Rule("critic.value_clip", "algorithm.advantage.value_clip", "", _gae),
    Rule("critic.freezing_steps", "trainer.critic.warmup_iterations", "",
         lambda value, values: value if values["algo.advantage.estimator"] == "gae" and value > 0 else Off()),
    *idle("the critic shares the actor's ranks", "critic.*"),
    Rule("algo.advantage.estimator", "algorithm.preset", "", lookup(PRESETS)),
    Rule("algo.advantage.gamma", "algorithm.advantage.gamma", "", _gae),
    Rule("algo.advantage.lambd", "algorithm.advantage.lam", "", _gae),
    Rule("algo.advantage.no_std_norm", "algorithm.advantage.kind", "the group mean alone",
         lambda value, values: "group_mean" if value and values["algo.advantage.estimator"] == "group_norm" else Off()),
    *idle("algorithm.correction: auto corrects where sampler and learner differ", "algo.advantage.is_correction_*"),
    *part_of("algorithm.kl", "algo.kl.init_coef", "algo.kl.use_loss", "algo.kl.estimator", "algo.kl.target", "algo.kl.horizon"),
    Rule("algo.dynamic_filtering_enable", "algorithm.dynamic_sampling"),
    *idle("groups with equal scores are dropped", "algo.dynamic_filtering_range"),
    *idle("not among our algorithms' parameters", "algo.*"),
    Rule("reward.normalize_enable", "algorithm.shaping.normalise", "by the run's scores; OpenRLHF has the reward model's mean and deviation"),
    Rule("reward.clip_range", "algorithm.shaping.clip"),
    *part_of("reward.rewards", "reward.model_name_or_path", "reward.remote_url"),
    Rule("reward.overlong_buffer_len", "algorithm.shaping.overlong", "/ rollout.max_new_tokens, with overlong_penalty_factor",
         overlong("reward.overlong_buffer_len", "rollout.max_new_tokens", "reward.overlong_penalty_factor")),
    *part_of("algorithm.shaping.overlong", "reward.overlong_penalty_factor"),
    *idle("set algorithm.shaping.truncation_mask, or let the reward read the finish reason", "reward.stop_properly_penalty_coef"),
    *idle("rewards are processes of the reward service", "reward.*"),
    *idle("the reference shares the learner's ranks", "ref.*"),
    Rule("vllm.num_engines", "rollout.replicas", "", lambda value, _: value or Off()),
    Rule("vllm.tensor_parallel_size", "rollout.tensor_parallel"),
    Rule("vllm.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    *idle(MEMORY, "vllm.enable_sleep"),
    *idle("an option of OpenRLHF's engines", "vllm.*"),
    *idle("replicas batch what they get", "rollout.*"),
    Rule("ds.tensor_parallel_size", "trainer.parallel.tensor"),
    Rule("ds.lora.rank", "trainer.lora", "0: all weights are trained", adapters("ds.lora.alpha", 16)),
    *part_of("trainer.lora", "ds.lora.alpha"),
    *idle("see trainer.lora", "ds.lora.*"),
    *part_of("model.dtype", "ds.param_dtype", "ds.bf16"),
    Rule("ds.adam_offload", "trainer.offload.optimizer"),
    *idle("the learner is Megatron-Core, not DeepSpeed", "ds.*"),
    Rule("ckpt.save_steps", "trainer.save_interval", "-1: only after the last iteration", positive),
    *idle("set eval_best: SET/METRIC", "ckpt.best_metric_key"),
    Rule("ckpt.max_num", "trainer.keep_checkpoints"),
    Rule("ckpt.path", "output_dir", "", path),
    *idle("every checkpoint is resumable, and the last is exported for Hugging Face", "ckpt.*"),
    Rule("eval.steps", "eval_interval", "-1: only before the first iteration and after the last", positive),
    Rule("eval.n_samples_per_prompt", "eval_answers", "one answer is greedy, several are sampled"),
    Rule("eval.temperature", "eval_temperature", "of several answers", above(0)),
    *idle("name a part of the rows with `split`", "eval.*"),
    Rule("logger.wandb.key", "trackers", "the key comes from WANDB_API_KEY", lambda value, _: [{"kind": "wandb"}]),
    *idle("metrics.jsonl and TensorBoard are always written", "logger.*"),
)  # fmt: skip

DEFAULTS = {
    "data.input_key": "input",
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "rollout.n_samples_per_prompt": 1,
    "train.num_episodes": 1,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.eps_clip": 0.2,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "reward.clip_range": [-10, 10],
}

OPENRLHF = System("openrlhf", "OpenRLHF", RULES, DEFAULTS, _fixed, epochs="train.num_episodes")


def with_dotted_names(values: Values) -> dict[str, Any]:
    """The values under the dotted names."""
    return {RENAMED.get(key, key): value for key, value in values.items()}
