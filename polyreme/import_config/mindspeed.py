"""MindSpeed RL: the YAML files of its PPO, GRPO and DAPO.

Keys and defaults: mindspeed_rl/config_cls/*.py. Sections are `megatron_training`, `actor_config`, `critic_config`, `rl_config`
and `generate_config`; a key of the actor's or the critic's section overrides that of `megatron_training`.

Invariant: this module and `mindspeed_keys` are the only places that know MindSpeed RL's keys.
"""

from polyreme.config.yaml_text import Tree
from polyreme.import_config.convert import KL, minibatches, placeholder, product, ratio, refused
from polyreme.import_config.environments import CLASS, PLACEHOLDER
from polyreme.import_config.mindspeed_keys import ACTOR, CRITIC, GENERATE, OPTIMIZER, RL, RULES, SAMPLING, SCHEDULES, TRAIN
from polyreme.import_config.rules import ITERATIONS, Fixed, ForeignEnvironment, System, Unresolved, Values

STAGES = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "ppo"}
VERIFIERS = {
    "acc": ("math", "1, -0.5 or -1 there, 1 or 0 here"),
    "base_acc": ("math", "also needs the format there"),
    "math_17k_acc": ("math", ""),
    "acc_for_dapo": ("math", "1 or -1 there, 1 or 0 here"),
    "acc_for_ppo": ("math", "other values there, 1 or 0 here"),
    "math_verify_reward": ("math", ""),
    "format": ("think_format", ""),
    "strict_format": ("think_format", "1 or -0.5, with one boxed answer, there; 1 or 0 here"),
}
"""Our reward for a verifier, and how their values differ."""

DEFAULTS = {
    f"{TRAIN}.global_batch_size": 1,
    f"{TRAIN}.train_iters": 1000,
    f"{ACTOR}.tensor_model_parallel_size": 1,
    f"{RL}.actor_resource.num_npus": 1,
    f"{RL}.adv_estimator": "group_norm",
    f"{RL}.clip_ratio": 0.2,
    f"{RL}.entropy_coeff": 0.001,
    f"{RL}.init_kl_coef": 0.01,
    f"{RL}.kl_penalty": "kl",
    f"{RL}.use_kl_in_reward": False,
    f"{RL}.gamma": 1.0,
    f"{RL}.lam": 0.95,
    f"{RL}.cliprange_value": 0.5,
    f"{RL}.max_prompt_length": 512,
    f"{RL}.mini_batch_size": 1,
    f"{RL}.n_samples_per_prompt": 1,
    f"{RL}.rule_reward": True,
    f"{RL}.verifier_function": ["base_acc"],
    f"{GENERATE}.infer_tensor_parallel_size": 8,
    f"{SAMPLING}.max_tokens": 128,
    f"{SAMPLING}.temperature": 0.2,
    f"{SAMPLING}.top_k": 50,
}


def _fixed(values: Values) -> Fixed:
    longest = values[f"{RL}.max_prompt_length"] + values[f"{SAMPLING}.max_tokens"]
    prompts = _prompts(values)
    fixed: Fixed = {
        "device": ("npu", "MindSpeed RL runs on Ascend"),
        "placement": ("colocated", "MindSpeed RL generates on the trainer's devices"),
        "model.dtype": ("bfloat16", "bf16, its only precision"),
        "groups_per_iteration": prompts,
        "algorithm.minibatches": minibatches(
            prompts[0],
            values[f"{RL}.mini_batch_size"],
            "global_batch_size / mini_batch_size, both in prompts: MindSpeed RL multiplies it by n_samples_per_prompt",
        ),
        **_algorithm(values),
        **_ranks(values),
        **_optimizer(ACTOR, "trainer.optimizer", values),
        "rollout.max_model_len": (
            max(values.get(f"{GENERATE}.max_model_len") or 0, longest),
            "max_model_len, at least max_prompt_length + max_tokens",
        ),
        "data.prompt_key": ("input_ids", "the column of its processed files (PREFIX_packed_input_ids_document.idx)"),
        "data.label_key": ("labels", "dataset_additional_keys"),
        "reward.rewards": _rewards(values),
    }
    if _is_gae(values):
        fixed |= _optimizer(CRITIC, "trainer.critic.optimizer", values)
    if (splits := values.get(f"{RL}.partial_rollout_max_split", 1)) > 1:
        fixed["max_staleness"] = (splits - 1, "partial_rollout_max_split: a response continues over so many further iterations")
    return fixed


def _is_gae(values: Values) -> bool:
    return bool(values[f"{RL}.adv_estimator"] == "gae")


def _prompts(values: Values) -> tuple[int, str]:
    """Prompts of an iteration. With filtered groups, generation goes on until there are so many."""
    if values.get(f"{RL}.filter_groups_enable") and (filtered := values.get(f"{RL}.filter_groups_train_batch_size")):
        return filtered, "filter_groups_train_batch_size, prompts after filtering"
    return values[f"{TRAIN}.global_batch_size"], "global_batch_size, prompts per iteration in both"


def _algorithm(values: Values) -> Fixed:
    stage, estimator = values.get(f"{TRAIN}.stage", "ray_grpo"), values[f"{RL}.adv_estimator"]
    if stage not in STAGES:
        raise refused("megatron_training.stage of an algorithm", stage, STAGES)
    if estimator not in ("gae", "group_norm"):
        raise refused("rl_config.adv_estimator of an estimator", estimator, ("gae", "group_norm"))
    gae = estimator == "gae"
    tokens = stage != "ray_dapo" or values.get(f"{RL}.token_level_loss", True)
    fixed: Fixed = {
        "algorithm.preset": ("ppo" if gae else {"ray_ppo": "grpo"}.get(stage, STAGES[stage]), "stage and adv_estimator"),
        "algorithm.aggregation": ("token-mean" if tokens else "seq-mean-token-mean", "token_level_loss, or the mean over tokens"),
        "algorithm.loss": (
            _clip(values, stage),
            "clip_ratio, or clip_ratio_low and clip_ratio_high of DAPO with clip_higher_enable",
        ),
        "algorithm.shaping.overlong": (None, "no overlong_buffer_enable"),
        "algorithm.dynamic_sampling": (
            bool(stage == "ray_dapo" and values.get(f"{RL}.filter_groups_enable")),
            "filter_groups_enable of DAPO; groups with equal scores are dropped",
        ),
        "algorithm.correction": ([], "MindSpeed RL corrects nothing"),
        "algorithm.kl": _kl(values, stage),
    }
    if stage == "ray_dapo" and values.get(f"{RL}.overlong_buffer_enable"):
        limit = values.get(f"{RL}.rollout_max_tokens", values[f"{SAMPLING}.max_tokens"])
        penalty = {
            "buffer": values.get(f"{RL}.overlong_buffer", 0) / limit,
            "factor": values.get(f"{RL}.overlong_buffer_penalty_factor", 1.0),
        }
        fixed["algorithm.shaping.overlong"] = (penalty, "overlong_buffer / rollout_max_tokens, overlong_buffer_penalty_factor")
    if gae:
        fixed["algorithm.advantage.whiten"] = (values.get(f"{RL}.advantage_whiten", True), "advantage_whiten")
    else:
        fixed["algorithm.advantage.std_floor"] = (1e-8, "added to the deviation of a group by MindSpeed RL")
    return fixed


def _clip(values: Values, stage: str) -> dict[str, object]:
    low = high = values[f"{RL}.clip_ratio"]
    if stage == "ray_dapo" and values.get(f"{RL}.clip_higher_enable"):
        low, high = values.get(f"{RL}.clip_ratio_low", low), values.get(f"{RL}.clip_ratio_high", high)
    return {"kind": "clip", "ratio": "token", "low": low, "high": high, "dual": None}


def _kl(values: Values, stage: str) -> tuple[object, str]:
    coef, reward, name = (values[f"{RL}.{key}"] for key in ("init_kl_coef", "use_kl_in_reward", "kl_penalty"))
    if not coef or stage == "ray_dapo" or (_is_gae(values) and not reward):
        return None, "init_kl_coef 0, DAPO, or a PPO without use_kl_in_reward"
    if name not in KL:
        raise refused("rl_config.kl_penalty of an estimator", name, KL)
    if KL[name] == "k1" and not reward:
        return None, "kl_penalty: kl in the loss, which has no gradient in expectation"
    kl = {"place": "reward" if reward else "loss", "estimator": KL[name], "coef": coef}
    return kl, "init_kl_coef, kl_penalty, use_kl_in_reward"


def _ranks(values: Values) -> Fixed:
    devices = values[f"{RL}.actor_resource.num_npus"]
    sizes = [values.get(f"{ACTOR}.{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")]
    ranks = product(*sizes)
    found: Fixed = {
        "trainer.parallel.data": (ratio(devices, ranks), f"num_npus {devices} / (tensor x pipeline x context ranks = {ranks})"),
        "rollout.replicas": (
            ratio(devices, values[f"{GENERATE}.infer_tensor_parallel_size"]),
            "num_npus / infer_tensor_parallel_size",
        ),
    }
    experts = values.get(f"{ACTOR}.expert_model_parallel_size", 1)
    if values.get(f"{ACTOR}.moe_tp_extend_ep") and experts > 1:
        both = {"expert": experts * product(sizes[0]), "expert_tensor": 1}
        found |= {f"trainer.parallel.{key}": (size, "expert_model_parallel_size, moe_tp_extend_ep") for key, size in both.items()}
    elif experts > 1:
        found["trainer.parallel.expert"] = (experts, "expert_model_parallel_size")
    return found


def _optimizer(section: str, target: str, values: Values) -> Fixed:
    """All settings of an optimizer: the section's, else Megatron's defaults in MindSpeed RL."""
    found = {ours: values.get(f"{section}.{key}", usual) for key, (ours, usual) in OPTIMIZER.items()}
    part, iterations = found["warmup"] or 0, values.get(ITERATIONS, values[f"{TRAIN}.train_iters"])
    found |= {
        "schedule": SCHEDULES.get(found["schedule"], "constant"),
        "warmup": round(part * iterations),
        "min_lr": min(found["min_lr"], found["lr"]),
        "eps": 1e-8,
    }
    names = {ours: key for key, (ours, _) in OPTIMIZER.items()} | {"eps": "Megatron's adam_eps"}
    return {f"{target}.{key}": (value, f"{section}: {names[key]}") for key, value in found.items()}


def _rewards(values: Values) -> tuple[object, str]:
    """Every verifier is one of ours, with a CHECK where its values differ, or a file to write; without rules, a reward model."""
    if not values[f"{RL}.rule_reward"]:
        return [{"model": "FILL_IN/reward-model"}], "CHECK: rule_reward: false; a directory with a sequence classifier"
    names, weights = values[f"{RL}.verifier_function"], values.get(f"{RL}.verifier_weight", [1.0])
    if isinstance(names, Unresolved) or isinstance(weights, Unresolved):
        return [placeholder("reward")], f"CHECK: the file does not say which verifiers and weights: {names}, {weights}"
    weights = weights if f"{RL}.verifier_weight" in values else [1.0] * len(names)
    found: dict[str, Tree] = {}
    notes = []
    for name, weight in zip(names, weights, strict=False):
        ours, difference = VERIFIERS.get(name, ("", "a function of its own: write it"))
        reward = {"name": ours} if ours else placeholder(name)
        label = str(reward["name"])
        found[label] = reward | {"weight": found.get(label, {}).get("weight", 0) + weight}
        notes += [f"{name}: {difference}"] if difference else []
    origin = f"verifier_function: {', '.join(names)}"
    return list(found.values()), f"CHECK: {origin}; {'; '.join(notes)}" if notes else origin


def _environment(values: Values) -> ForeignEnvironment | None:
    """The tools of a run of several turns. Each call is a turn, and an answer follows the last."""
    if not values.get(f"{RL}.multi_turn_enable"):
        return None
    calls, tools = values.get(f"{RL}.max_tool_calls"), values.get(f"{RL}.tool_config_path")
    return ForeignEnvironment(
        file=PLACEHOLDER,
        origin=f"tool_config_path: {tools}",
        turns=calls + 1 if calls else None,
        turns_origin="max_tool_calls + 1",
        key=f"{RL}.multi_turn_enable",
        value=True,
        loss=f"several turns: write its tools as {CLASS}",
        tokens=values[f"{RL}.max_prompt_length"]
        + (values.get(f"{RL}.max_total_response_length") or values[f"{SAMPLING}.max_tokens"]),
    )


MINDSPEED = System("mindspeed", "MindSpeed RL", RULES, DEFAULTS, _fixed, environment=_environment)
_SHARED = frozenset(
    {*OPTIMIZER, "expert_model_parallel_size", "moe_tp_extend_ep", "recompute_granularity"}
    | {f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")}
)
"""Keys of `megatron_training` that the actor's and the critic's section may override."""


def with_inherited(values: Values) -> dict[str, object]:
    """The values with the keys of `megatron_training` that another section may override, in these sections."""
    shared = {key: values[f"{TRAIN}.{key}"] for key in _SHARED if f"{TRAIN}.{key}" in values}
    sections = [
        section for section in (ACTOR, CRITIC) if any(key.startswith(f"{section}.") for key in values) or section == ACTOR
    ]
    moved = {f"{section}.{key}": value for section in sections for key, value in shared.items()}
    return moved | {key: value for key, value in values.items() if key.removeprefix(f"{TRAIN}.") not in shared or key in moved}
