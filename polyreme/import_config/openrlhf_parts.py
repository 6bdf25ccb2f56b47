"""Our keys that follow from several options of OpenRLHF: lengths, batches, ranks, rewards, the KL, the correction.

Invariant: pure functions of the values under the dotted names, with OpenRLHF's defaults for those that a command line lacks.
"""

from polyreme.import_config.convert import local, path, placeholder, product, ratio
from polyreme.import_config.environments import TAKEN
from polyreme.import_config.rules import Fixed, ForeignEnvironment, Lost, Unresolved, Values

PRESETS = {
    "gae": "ppo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
"""Our preset for each estimator."""
PER_GROUP = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline")
"""Estimators that compare the samples of a prompt."""
UNBOUNDED = 1e9
"""A cap of importance weights that is never reached."""


def fixed(values: Values) -> Fixed:
    """Our keys with their origin."""
    return {
        "device": ("cuda", "OpenRLHF's device"),
        "placement": ("separate", "without colocate_all, or with async_enable"),
        "data.template": ("chat" if values.get("data.apply_chat_template") else "none", "apply_chat_template"),
        "algorithm.aggregation": _aggregation(values),
        **({} if values.get("train.agent_func_path") else {"reward.rewards": rewards(values)}),
        **_lengths(values),
        **_batches(values),
        **_ranks(values),
        **_kl(values),
        **_correction(values),
        **_critic(values),
    }


def _aggregation(values: Values) -> tuple[object, str]:
    if values.get("actor.policy_loss_type") == "gspo":
        return "seq-mean-token-mean", "policy_loss_type: gspo"
    return values["actor.loss_agg_mode"], "loss_agg_mode; token-mean in every version before it"


def prompt_tokens(values: Values) -> int:
    """The longest prompt."""
    return int(
        values.get("data.prompt_max_len") or max(1, values["data.max_len"] - (values.get("rollout.max_new_tokens") or 1024))
    )


def new_tokens(values: Values) -> int:
    """The longest response."""
    return int(values.get("rollout.max_new_tokens") or max(1, values["data.max_len"] - prompt_tokens(values)))


def _lengths(values: Values) -> Fixed:
    given = values.get("rollout.max_new_tokens")
    why = (
        "max_new_tokens, formerly generate_max_len" if given else "CHECK: OpenRLHF generates up to max_len - the prompt's length"
    )
    longest = "prompt_max_len, or max_len - max_new_tokens; longer prompts are left out"
    return {
        "data.max_prompt_tokens": (prompt_tokens(values), longest),
        "rollout.max_new_tokens": (new_tokens(values), why),
        "rollout.max_model_len": (prompt_tokens(values) + new_tokens(values), "prompt and response"),
    }


def _batches(values: Values) -> Fixed:
    samples = product(values["rollout.batch_size"], values["rollout.n_samples_per_prompt"])
    origin = "rollout.batch_size x n_samples_per_prompt / train.batch_size: the latter counts samples, the former prompts"
    return {"algorithm.minibatches": (min(values["rollout.batch_size"], ratio(samples, values["train.batch_size"])), origin)}


def _ranks(values: Values) -> Fixed:
    world = product(values["actor.num_nodes"], values["actor.num_gpus_per_node"])
    tensor, context = product(values.get("ds.tensor_parallel_size")), product(values.get("ds.ring_attn_size"))
    data, nodes = ratio(world, tensor * context), product(values["actor.num_nodes"])
    origin = "actor.num_nodes x num_gpus_per_node / (tensor x ring ranks); ZeRO's ranks are data-parallel here"
    ranks: Fixed = {"trainer.parallel.data": (data, origin)}
    if data % nodes == 0:
        ranks["trainer.parallel.nodes"] = (nodes, "actor.num_nodes")
    if not values.get("vllm.num_engines"):
        ranks["rollout.replicas"] = (ratio(world, values.get("vllm.tensor_parallel_size") or 1), "no vllm.num_engines")
    return ranks


def rewards(values: Values) -> tuple[object, str]:
    """The rewards, and what to check about them. Every one that the command line names is in the list."""
    if remote := values.get("reward.remote_url"):
        return _remote(remote, values)
    if model := values.get("reward.model_name_or_path"):
        names = [local(each) for each in str(model).split(",")]
        listed = [{"model": name} for name in names]
        return listed, "CHECK: reward.model_name_or_path, as directories on this machine" + _weights(len(names))
    return [placeholder("reward")], "CHECK: the command line names no reward"


def environment(values: Values) -> ForeignEnvironment | None:
    """The agent's file, which gives the rewards, too; its last answer is the agent's decision."""
    key = "train.agent_func_path"
    if not (agent := values.get(key)):
        return None
    return ForeignEnvironment(
        file=local(str(agent)),
        origin=f"agent_func_path: {agent}",
        turns=None,
        turns_origin="limit of turns: the agent decides",
        key=key,
        value=agent,
        loss=f"an agent: {TAKEN}",
    )


def _remote(remote: object, values: Values) -> tuple[object, str]:
    open_text = isinstance(remote, Unresolved)
    parts = [str(remote)] if open_text else [local(each) for each in str(remote).split(",")]
    if parts[0].endswith(".py"):
        function = {"file": parts[0], "function": "reward_func"}
        if len(parts) > 1:
            return [function], "CHECK: OpenRLHF calls only the first of several Python files"
        return [function], "CHECK: a Python file on this machine" + ("; the script does not say where it is" if open_text else "")
    if open_text:
        return [placeholder("remote")], f"CHECK: the script does not say what {remote} is: a URL or a Python file"
    return [{"url": parts[0] if len(parts) == 1 else parts, "protocol": "openrlhf"}], (
        "CHECK: the server must be reachable from this machine" + ("; several share the load in both" if len(parts) > 1 else "")
    )


def _weights(count: int) -> str:
    return f"; {count} rewards are added here, each with weight 1" if count > 1 else ""


def _kl(values: Values) -> Fixed:
    coef, in_loss = values["algo.kl.init_coef"], values["algo.kl.use_loss"]
    if not coef:
        return {"algorithm.kl": (None, "init_kl_coef: 0")}
    estimator = "k3" if values.get("algo.kl.use_k3") else values["algo.kl.estimator"]
    if in_loss and values.get("algo.kl.unbiased_gradient"):
        estimator += "+"
    if in_loss and estimator == "k1":
        why = "in the loss, the gradient of k1 is 0 in expectation, so there is no KL here; k2 or k3 are estimators for the loss"
        return {"algorithm.kl": (None, "see the list of what was not carried over"), "lost kl": (Lost(why), "algo.kl.estimator")}
    place = "in the loss"
    if not in_loss:
        place = "in the reward"
        if values["algo.advantage.estimator"] in PER_GROUP:
            place += ". CHECK: OpenRLHF subtracts the KL of the following tokens after the comparison of the group;"
            place += " here the KL of the whole response is part of the compared score"
    kl: Fixed = {
        "algorithm.kl.place": ("loss" if in_loss else "reward", f"use_kl_loss: {place}"),
        "algorithm.kl.estimator": (estimator, "kl_estimator"),
        "algorithm.kl.coef": (coef, "init_kl_coef"),
    }
    target = values.get("algo.kl.target")
    if target and not in_loss:
        adaptive = {"target": target, "horizon": int(values.get("algo.kl.horizon", 10_000)), "unit": "token"}
        kl["algorithm.kl.adaptive"] = (adaptive, "kl_target, a mean per token, and kl_horizon")
    elif target:
        kl["algorithm.kl.adaptive"] = (
            Lost("the controller needs the KL in the reward; the coefficient is constant here"),
            "algo.kl.target",
        )
    return kl


def correction(values: Values) -> tuple[object, str]:
    """The corrections of the engine's probabilities, and their origin. `Lost`: there is no counterpart."""
    options = _correction_options(values)
    if options is None:
        return [], "off in OpenRLHF, also where rounding differs"
    level, mode, gating, (low, high) = options
    if gating != "ratio":
        return Lost(f"gating by {gating} has no counterpart; nothing is corrected here"), "algo.advantage.is_correction_gating"
    if level == "seq":
        masks = [{"kind": "geometric_mask", "low": low, "high": high}, {"kind": "token_tis", "cap": UNBOUNDED}]
        return masks, "sequences by the geometric mean of their weights; the weights of the others without a cap"
    if mode == "mask":
        return [{"kind": "icepop", "low": low, "high": high}], "tokens outside the threshold are left out (icepop)"
    note = f". CHECK: OpenRLHF also raises weights below {low:g}" if low else ""
    return [{"kind": "token_tis", "cap": high}], f"weights are at most {high:g}{note}"


def _correction_options(values: Values) -> tuple[str, str, str, tuple[float, float]] | None:
    """Level, mode, gating and bounds, from the options of any version; None: off."""
    threshold = values.get("algo.advantage.is_correction_threshold", [0.5, 5.0])
    bounds = threshold if isinstance(threshold, list) and len(threshold) == 2 else [0.0, _last(threshold)]
    if values.get("algo.advantage.is_correction_enable"):
        kind = "icepop" if values.get("algo.advantage.use_icepop") else values.get("algo.advantage.is_correction_type", "tis")
        level, mode = {"icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}.get(kind, ("token", "clip"))
        return level, mode, "ratio", (bounds[0], bounds[1])
    level = values["algo.advantage.is_correction_level"]
    if level in ("off", False):  # YAML reads off as false
        return None
    mode, gating = (
        values.get("algo.advantage.is_correction_mode", "mask"),
        values.get("algo.advantage.is_correction_gating", "ratio"),
    )
    return level, mode, gating, (bounds[0], bounds[1])


def _last(threshold: float | list[float]) -> float:
    return float(threshold[-1] if isinstance(threshold, list) else threshold)


def _correction(values: Values) -> Fixed:
    if values.get("actor.policy_loss_type") == "gspo" and _correction_options(values) is not None:
        why = "with gspo, the correction is the ratio to the sampling policy"
        return {"algorithm.anchor": ("behaviour", why), "algorithm.correction": ([], why)}
    found, origin = correction(values)
    if isinstance(found, Lost):
        return {"algorithm.correction": ([], "see the list of what was not carried over"), "lost": (found, origin)}
    return {"algorithm.correction": (found, origin)}


def _critic(values: Values) -> Fixed:
    model = values.get("reward.model_name_or_path")
    if values["algo.advantage.estimator"] != "gae" or values.get("critic.model_name_or_path"):
        return {}
    if model and not values.get("reward.remote_url"):
        first = path(str(model).split(",")[0], values)
        return {"trainer.critic.path": (first, "CHECK: OpenRLHF's critic starts from the first reward model")}
    return {}
