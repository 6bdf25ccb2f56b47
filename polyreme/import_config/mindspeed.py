"""MindSpeed RL: the YAML files of its PPO, GRPO and DAPO.

Keys and defaults: mindspeed_rl/config_cls/*.py. Sections are `megatron_training`, `actor_config`, `critic_config`, `rl_config` and
`generate_config`; a key of the actor's or the critic's section overrides that of `megatron_training`.

Invariant: the table below is the only place that knows MindSpeed RL's keys.
"""

from typing import Any

from polyreme.import_config.convert import KL, above, lookup, path, product, ratio, when
from polyreme.import_config.rules import Off, Rule, System, Values, idle, part_of

TRAIN, ACTOR, CRITIC, RL, GENERATE = "megatron_training", "actor_config", "critic_config", "rl_config", "generate_config"
SAMPLING = f"{GENERATE}.sampling_config"
VERIFIERS = {
    **dict.fromkeys(["acc", "base_acc", "math_17k_acc", "acc_for_dapo", "acc_for_ppo", "math_verify_reward"], "math"),
    **dict.fromkeys(["format", "strict_format", "step"], "think_format"),
}
MEMORY = "see trainer.offload; with placement: colocated, replicas and learner leave the devices to each other"
GAE = when(f"{RL}.adv_estimator", "gae")


def _kl(values: Values) -> Any:
    coef, reward = values[f"{RL}.init_kl_coef"], values[f"{RL}.use_kl_in_reward"]
    gae = values[f"{RL}.adv_estimator"] == "gae"
    if not coef or (gae and not reward) or values.get(f"{TRAIN}.stage") == "ray_dapo":
        return None
    return {"place": "reward" if reward else "loss", "estimator": KL.get(values[f"{RL}.kl_penalty"], "k3"), "coef": coef}


def _rewards(names: Any, values: Values) -> Any:
    weights = values.get(f"{RL}.verifier_weight", [1.0] * len(names))
    found: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=False):
        if ours := VERIFIERS.get(name):
            found[ours] = found.get(ours, 0) + weight
    return [{"name": name, "weight": weight} for name, weight in found.items()] or Off()


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    devices = values[f"{RL}.actor_resource.num_npus"]
    ranks = product(
        values[f"{ACTOR}.tensor_model_parallel_size"],
        values.get(f"{ACTOR}.pipeline_model_parallel_size"),
        values.get(f"{ACTOR}.context_parallel_size"),
    )
    preset = {"ray_dapo": "dapo", "ray_ppo": "ppo"}.get(values.get(f"{TRAIN}.stage", ""), "grpo")
    kl = _kl(values)
    fixed: dict[str, tuple[Any, str]] = {
        "device": ("npu", "MindSpeed RL runs on Ascend"),
        "placement": ("colocated", "MindSpeed RL generates on the trainer's devices"),
        "model.dtype": ("bfloat16", "bf16, its only precision"),
        "algorithm.preset": ("ppo" if values[f"{RL}.adv_estimator"] == "gae" else preset, "stage and adv_estimator"),
        "algorithm.aggregation": ("token-mean", "token_level_loss"),
        "trainer.parallel.data": (
            ratio(devices, ranks),
            f"num_npus {devices} / (tensor x pipeline x context ranks = {ranks})",
        ),
        "rollout.replicas": (
            ratio(devices, values[f"{GENERATE}.infer_tensor_parallel_size"]),
            "num_npus / infer_tensor_parallel_size",
        ),
        "rollout.max_model_len": (
            values[f"{RL}.max_prompt_length"] + values[f"{SAMPLING}.max_tokens"],
            "max_prompt_length + max_tokens",
        ),
        "data.prompt_key": ("input_ids", "the column of its processed files (PREFIX_packed_input_ids_document.idx)"),
        "data.label_key": ("labels", "dataset_additional_keys"),
        "reward.rewards": ([{"name": "math"}], "CHECK: no verifier_function that we have"),
    }
    if (splits := values.get(f"{RL}.partial_rollout_max_split", 1)) > 1:
        fixed["max_staleness"] = (splits - 1, "partial_rollout_max_split: a response continues over so many further iterations")
    for key, part in (kl or {}).items():
        fixed[f"algorithm.kl.{key}"] = (part, "init_kl_coef, kl_penalty, use_kl_in_reward")
    if kl is None:
        fixed["algorithm.kl"] = (None, "init_kl_coef 0, or a PPO without use_kl_in_reward")
    return fixed


def _warmup(section: str) -> Any:
    return lambda value, values: round(value * values[f"{TRAIN}.train_iters"])


def _optimizer(section: str, target: str) -> tuple[Rule, ...]:
    used = None if section == ACTOR else GAE
    return (
        Rule(f"{section}.lr", f"{target}.lr", "", used),
        Rule(f"{section}.min_lr", f"{target}.min_lr", "", used),
        Rule(f"{section}.lr_decay_style", f"{target}.schedule", "",
             lookup({"constant": "constant", "linear": "linear", "cosine": "cosine"}) if used is None else used),
        Rule(f"{section}.lr_warmup_fraction", f"{target}.warmup", "x train_iters", _warmup(section)),
        Rule(f"{section}.weight_decay", f"{target}.weight_decay", "", used),
        Rule(f"{section}.clip_grad", f"{target}.clip_grad", "", used),
        Rule(f"{section}.adam_beta1", f"{target}.beta1", "", used),
        Rule(f"{section}.adam_beta2", f"{target}.beta2", "", used),
    )  # fmt: skip


RULES = (
    *idle("the model's architecture is in its config.json", "defaults"),
    Rule(f"{TRAIN}.tokenizer_name_or_path", "model.path", "CHECK: a Hugging Face directory with weights on this machine", path),
    Rule(f"{TRAIN}.global_batch_size", "groups_per_iteration", "prompts per iteration in both"),
    Rule(f"{TRAIN}.train_iters", "iterations"),
    Rule(f"{TRAIN}.save_interval", "trainer.save_interval"),
    Rule(f"{TRAIN}.seed", "seed"),
    Rule(f"{TRAIN}.data_path", "data.train", "CHECK: the prefix of the processed files", path),
    Rule(f"{TRAIN}.no_shuffle", "data.shuffle", "the negation", lambda value, _: not value),
    *idle("name a source with `split` in data.train and data.eval", f"{TRAIN}.split"),
    *part_of("algorithm.preset", f"{TRAIN}.stage"),
    *idle("prompts and responses have limits of their own", f"{TRAIN}.seq_length"),
    *part_of("data.label_key", f"{TRAIN}.dataset_additional_keys"),
    *idle("an option of Megatron that the learner sets itself or does not have", f"{TRAIN}.*"),
    *_optimizer(ACTOR, "trainer.optimizer"),
    Rule(f"{ACTOR}.tensor_model_parallel_size", "trainer.parallel.tensor"),
    Rule(f"{ACTOR}.pipeline_model_parallel_size", "trainer.parallel.pipeline", "every stage has equally many layers"),
    Rule(f"{ACTOR}.context_parallel_size", "trainer.parallel.context"),
    *(
        rule
        for section in (TRAIN, ACTOR)
        for rule in (
            Rule(f"{section}.expert_model_parallel_size", "trainer.parallel.expert", "1: experts are not divided", above(1)),
            Rule(f"{section}.recompute_granularity", "trainer.recompute", "selective: the activations inside each MLP",
                 lookup({"selective": "selective", "full": "full"})),
            Rule(f"{section}.moe_aux_loss_coeff", "trainer.moe.aux_loss_coef", "0: none", above(0)),
            Rule(f"{section}.moe_z_loss_coeff", "trainer.moe.z_loss_coef", "0: none", above(0)),
        )
    ),
    Rule(f"{ACTOR}.micro_batch_size", "trainer.micro_batch_tokens", "x (max_prompt_length + max_tokens)",
         lambda value, values: value * (values[f"{RL}.max_prompt_length"] + values[f"{SAMPLING}.max_tokens"])),
    *idle("a Megatron checkpoint: `polyreme convert` makes a Hugging Face directory for model.path", f"{ACTOR}.load"),
    *idle("checkpoints are in output_dir/name", f"{ACTOR}.save"),
    *idle("--resume continues a run; a new run starts from model.path", f"{ACTOR}.finetune"),
    *idle("a resume always restores optimizer and random state", f"{ACTOR}.no_load_*"),
    *idle("an option of Megatron that the learner sets itself or does not have", f"{ACTOR}.*"),
    *_optimizer(CRITIC, "trainer.critic.optimizer"),
    *idle("with the actor's; in MindSpeed RL a path equal to the actor's mixes the files of both, which `polyreme convert` refuses", f"{CRITIC}.save"),
    *idle("convert it with `polyreme convert --critic` and set trainer.critic.path", f"{CRITIC}.load"),
    *idle("the critic shares the actor's ranks and micro-batches", f"{CRITIC}.*"),
    Rule(f"{RL}.n_samples_per_prompt", "group_size"),
    Rule(f"{RL}.mini_batch_size", "algorithm.minibatches",
         "global_batch_size / mini_batch_size, both in prompts: MindSpeed RL multiplies it by n_samples_per_prompt",
         lambda value, values: ratio(values[f"{TRAIN}.global_batch_size"], value)),
    Rule(f"{RL}.epochs", "algorithm.epochs"),
    Rule(f"{RL}.clip_ratio", "algorithm.loss", "both bounds", lambda value, _: {"low": value, "high": value}),
    Rule(f"{RL}.clip_ratio_low", "algorithm.loss.low", "", when(f"{RL}.clip_higher_enable")),
    Rule(f"{RL}.clip_ratio_high", "algorithm.loss.high", "", when(f"{RL}.clip_higher_enable")),
    *part_of("algorithm.loss", f"{RL}.clip_higher_enable"),
    Rule(f"{RL}.cliprange_value", "algorithm.advantage.value_clip", "", GAE),
    Rule(f"{RL}.entropy_coeff", "algorithm.entropy_coef"),
    Rule(f"{RL}.gamma", "algorithm.advantage.gamma", "", GAE),
    Rule(f"{RL}.lam", "algorithm.advantage.lam", "", GAE),
    *part_of("algorithm.preset", f"{RL}.adv_estimator"),
    *part_of("algorithm.kl", f"{RL}.kl_penalty"),
    *idle("adaptive never takes effect in MindSpeed RL; here it is algorithm.kl.adaptive", f"{RL}.kl_ctrl_type"),
    *part_of("algorithm.kl", f"{RL}.init_kl_coef"),
    *part_of("algorithm.kl", f"{RL}.use_kl_in_reward"),
    Rule(f"{RL}.max_prompt_length", "data.max_prompt_tokens"),
    Rule(f"{RL}.verifier_function", "reward.rewards", "with verifier_weight; accuracies are `math`, formats `think_format`", _rewards),
    *part_of("reward.rewards", f"{RL}.verifier_weight"),
    *idle("reward.rewards lists rules and models alike", f"{RL}.rule_reward"),
    Rule(f"{RL}.filter_groups_enable", "algorithm.dynamic_sampling"),
    *idle("groups are filtered by their scores, without a limit of batches", f"{RL}.filter_groups_*"),
    Rule(f"{RL}.overlong_buffer_enable", "algorithm.shaping.overlong", "with overlong_buffer, rollout_max_tokens and the factor",
         lambda value, values: {"buffer": values.get(f"{RL}.overlong_buffer", 0) / values.get(f"{RL}.rollout_max_tokens", 2048),
                                "factor": values.get(f"{RL}.overlong_buffer_penalty_factor", 1.0)} if value else None),
    *part_of("algorithm.shaping.overlong", f"{RL}.overlong_buffer*"),
    *part_of("algorithm.shaping.overlong", f"{RL}.rollout_max_tokens"),
    *part_of("trainer.parallel.data", f"{RL}.actor_resource.num_npus"),
    *idle("all roles share the learner's ranks", f"{RL}.*_resource.*"),
    Rule(f"{RL}.use_wandb", "trackers", "", lambda value, _: [{"kind": "wandb"}] if value else Off()),
    *idle("TensorBoard files are always written", f"{RL}.use_tensorboard"),
    Rule(f"{RL}.partial_rollout_max_split", "rollout.tokens_per_iteration", "max_tokens / partial_rollout_max_split",
         lambda value, values: -(-values[f"{SAMPLING}.max_tokens"] // value) if value > 1 else Off()),
    *idle("set placement: separate and max_staleness: 1 to overlap generation and training", f"{RL}.blocking"),
    *idle("an option of MindSpeed RL's workers and queues", f"{RL}.*"),
    Rule(f"{GENERATE}.infer_tensor_parallel_size", "rollout.tensor_parallel"),
    Rule(f"{GENERATE}.max_num_seqs", "rollout.max_num_seqs"),
    Rule(f"{GENERATE}.max_model_len", "rollout.max_model_len", "at least max_prompt_length + max_tokens",
         lambda value, values: max(value, values[f"{RL}.max_prompt_length"] + values[f"{SAMPLING}.max_tokens"])),
    Rule(f"{GENERATE}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    *part_of("model.dtype", f"{GENERATE}.dtype"),
    *idle(MEMORY, f"{GENERATE}.offload_*"),
    Rule(f"{SAMPLING}.max_tokens", "rollout.max_new_tokens"),
    Rule(f"{SAMPLING}.temperature", "rollout.temperature"),
    *part_of("seed", f"{SAMPLING}.seed"),
    *idle("samples are drawn from the whole distribution, with log-probabilities", f"{SAMPLING}.*"),
    *idle("an option of its vLLM", f"{GENERATE}.*"),
)  # fmt: skip

DEFAULTS = {
    f"{TRAIN}.global_batch_size": 1,
    f"{TRAIN}.train_iters": 1000,
    f"{ACTOR}.tensor_model_parallel_size": 1,
    f"{RL}.actor_resource.num_npus": 1,
    f"{RL}.adv_estimator": "group_norm",
    f"{RL}.clip_ratio": 0.2,
    f"{RL}.init_kl_coef": 0.01,
    f"{RL}.kl_penalty": "low_var_kl",
    f"{RL}.use_kl_in_reward": False,
    f"{RL}.gamma": 1.0,
    f"{RL}.lam": 0.95,
    f"{RL}.cliprange_value": 0.5,
    f"{RL}.max_prompt_length": 512,
    f"{RL}.mini_batch_size": 1,
    f"{RL}.n_samples_per_prompt": 1,
    f"{RL}.verifier_function": ["base_acc"],
    f"{GENERATE}.infer_tensor_parallel_size": 8,
    f"{SAMPLING}.max_tokens": 128,
}

MINDSPEED = System("mindspeed", "MindSpeed RL", RULES, DEFAULTS, _fixed)


def with_inherited(values: Values) -> dict[str, Any]:
    """The values with the keys of `megatron_training` that the actor's section may override, in that section."""
    shared = {key.removeprefix(f"{TRAIN}."): value for key, value in values.items() if key.startswith(f"{TRAIN}.")}
    inherited = {rule.key.removeprefix(f"{ACTOR}.") for rule in RULES if rule.key.startswith(f"{ACTOR}.") and rule.target}
    moved = {f"{ACTOR}.{key}": value for key, value in shared.items() if key in inherited}
    return {
        **moved,
        **{key: value for key, value in values.items() if key.removeprefix(f"{TRAIN}.") not in inherited or key not in moved},
    }
