"""What verl trains, as our keys: estimator, loss, KL, corrections, from all values of a configuration.

Units and formulas: verl/trainer/ppo/core_algos.py, verl/trainer/ppo/rollout_corr_helper.py.

Invariant: an algorithm without a counterpart is refused; any other part without one is `Lost`. Pure.
"""

from polyreme.errors import ConfigError
from polyreme.import_config.convert import KL, refused
from polyreme.import_config.rules import PART, Fixed, Lost, Off, Values

MODE = "trainer.v1.trainer_mode"
"""The key of verl's newer trainer with which samples may be older than the weights: colocate_async, separate_async."""
ACTOR, CORRECTION, DISTILLATION = "actor_rollout_ref.actor", "algorithm.rollout_correction", "distillation"
PRESETS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "opo": "opo",
    "gdpo": "gdpo",
}
LOSSES = {
    "vanilla": "clip",
    "gspo": "clip",
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "geometric_mean",
    "dppo_tv": "tv_mask",
    "gpg": "policy_gradient",
}
"""Our kind of loss for each of verl's loss modes."""
OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Loss modes that verl aggregates as seq-mean-token-mean, whatever loss_agg_mode says."""
GRPO = ("grpo", "grpo_vectorized")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
MASKS = ("geometric", "seq_mean_k1")
"""Rejections by the geometric mean of a response's weights."""


def algorithm(values: Values) -> Fixed:
    """The section `algorithm` apart from the batch arithmetic."""
    mode, estimator = values["actor_rollout_ref.actor.policy_loss.loss_mode"], values["algorithm.adv_estimator"]
    if mode == "bypass_mode":
        mode = "gpg" if values.get(f"{CORRECTION}.loss_type") == "reinforce" else "vanilla"
    aggregation = "seq-mean-token-mean" if mode in OF_SEQUENCES else _aggregation(values)
    fixed: Fixed = {
        "algorithm.preset": (_preset(values, mode), f"adv_estimator: {estimator}, loss_mode: {mode}"),
        "algorithm.loss": (_loss(mode, values), f"loss_mode: {mode}, with its clip_ratio_* or tau_*"),
        "algorithm.aggregation": (
            aggregation,
            f"loss_mode {mode} has its own" if mode in OF_SEQUENCES else f"loss_agg_mode: {aggregation}",
        ),
        "algorithm.shaping.overlong": _overlong(values),
        "algorithm.dynamic_sampling": (
            bool(values.get("algorithm.filter_groups.enable")),
            "filter_groups.enable; groups with equal scores are dropped",
        ),
        "algorithm.anchor": ("old", "the trainer's own log-probabilities"),
        "algorithm.correction": (_correction(values), "rollout_correction; without it, verl corrects nothing"),
        **_kl(values),
        **_distillation(values),
    }
    if estimator in GRPO and not values["algorithm.norm_adv_by_std_in_grpo"]:
        fixed["algorithm.advantage.kind"] = ("group_mean", "norm_adv_by_std_in_grpo: false")
    if bypasses(values) or mode == "dppo_tv":
        why = "bypass_mode: ratios against the sampling policy"
        note = (
            why if bypasses(values) else "CHECK: tv_mask needs the sampling policy; without bypass_mode, verl uses its trainer's"
        )
        fixed["algorithm.anchor"], fixed["algorithm.correction"] = ("behaviour", note), ([], "none with anchor: behaviour")
    return fixed


def _aggregation(values: Values) -> str:
    name = str(values[f"{ACTOR}.loss_agg_mode"])
    if values.get(f"{ACTOR}.use_token_level_loss") is False:  # of the first versions of DAPO
        name = "seq-mean-token-mean"
    if name not in AGGREGATIONS:
        raise refused("loss_agg_mode of an aggregation", name, AGGREGATIONS)
    return name


def _preset(values: Values, mode: str) -> str:
    estimator, normalised = values["algorithm.adv_estimator"], values["algorithm.norm_adv_by_std_in_grpo"]
    if estimator == "gpg":
        raise ConfigError(
            "algorithm.adv_estimator of an estimator that Polyreme has",
            "gpg: each score minus the mean of its group, times (samples / samples whose score is not 0) of the batch",
            "Without this factor it is adv_estimator: grpo with norm_adv_by_std_in_grpo: false; keep policy_loss.loss_mode: "
            "gpg, which is algorithm.loss.kind: policy_gradient.",
        )
    if estimator not in PRESETS:
        raise refused("algorithm.adv_estimator of an estimator", estimator, PRESETS)
    if estimator == "gdpo" and not normalised:
        raise refused("algorithm.norm_adv_by_std_in_grpo with gdpo", normalised, [True])
    if estimator in GRPO and mode in ("gspo", "cispo", "sapo", "dppo_tv"):
        return mode
    sums = values[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    return "dr_grpo" if estimator in GRPO and not normalised and sums else PRESETS[estimator]


def _loss(mode: str, values: Values) -> dict[str, object]:
    if mode not in LOSSES:
        raise refused("policy_loss.loss_mode of a loss", mode, LOSSES)
    kind, usual = LOSSES[mode], values[f"{ACTOR}.clip_ratio"]
    low, high = (usual if (bound := values.get(f"{ACTOR}.clip_ratio_{side}")) is None else bound for side in ("low", "high"))
    dual = values[f"{ACTOR}.clip_ratio_c"]
    match mode:
        case "sapo":
            return {"kind": kind, "tau_positive": values[f"{ACTOR}.tau_pos"], "tau_negative": values[f"{ACTOR}.tau_neg"]}
        case "gpg":
            return {"kind": kind}
        case "geo_mean":
            return {"kind": kind, "low": low, "high": high}
        case "dppo_tv":  # a probability moves by at most 1
            return {"kind": kind, "low": min(low, 1.0), "high": min(high, 1.0), "cap": dual}
        case "cispo":  # a ratio is at least 0
            return {"kind": kind, "low": min(low, 1.0), "high": high}
        case "gspo":
            return {"kind": kind, "ratio": "sequence", "low": min(low, 1.0), "high": high, "dual": None}
    return {"kind": kind, "ratio": "token", "low": min(low, 1.0), "high": high, "dual": dual}


def clip_ratio(value: object, values: Values) -> object:
    """The fate of clip_ratio: verl's newer versions read the two other keys, which have defaults of their own."""
    bounds = [values.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
    if all(bound is not None for bound in bounds) or value == 0.2:
        return PART
    return Lost(
        "CHECK: taken as both bounds; since 2025, verl reads clip_ratio_low and clip_ratio_high, 0.2 where a file does not set"
        " them"
    )


def _kl(values: Values) -> Fixed:
    if values[f"{ACTOR}.use_kl_loss"] and values[f"{ACTOR}.kl_loss_coef"]:
        estimator = _estimator(values[f"{ACTOR}.kl_loss_type"])
        if estimator == "k1":
            return {"algorithm.kl": (None, "kl_loss_type: kl, which has no gradient in expectation")}
        kl = {"place": "loss", "estimator": estimator, "coef": values[f"{ACTOR}.kl_loss_coef"]}
        return {"algorithm.kl": (kl, "use_kl_loss, kl_loss_type, kl_loss_coef")}
    if not values["algorithm.use_kl_in_reward"] or not values["algorithm.kl_ctrl.kl_coef"]:
        return {"algorithm.kl": (None, "neither use_kl_loss nor use_kl_in_reward")}
    kl = {"place": "reward", "estimator": _estimator(values["algorithm.kl_penalty"]), "coef": values["algorithm.kl_ctrl.kl_coef"]}
    fixed: Fixed = {"algorithm.kl": (kl, "use_kl_in_reward, kl_penalty, kl_ctrl")}
    if values["algorithm.kl_ctrl.type"] == "adaptive":
        target, horizon = values["algorithm.kl_ctrl.target_kl"], int(values["algorithm.kl_ctrl.horizon"])
        adaptive = {"target": target, "horizon": horizon, "unit": "token"}
        fixed["algorithm.kl.adaptive"] = (adaptive, "kl_ctrl: verl's target is a mean per token")
    return fixed


def _estimator(name: str) -> str:
    if name not in KL:
        raise refused("kl_penalty or kl_loss_type of an estimator", name, KL)
    return KL[name]


def kl_loss_type(value: str, values: Values) -> object:
    """The fate of kl_loss_type: k1 in the loss trains nothing."""
    if values[f"{ACTOR}.use_kl_loss"] and values[f"{ACTOR}.kl_loss_coef"] and KL.get(value) == "k1":
        return Lost("kl in the loss has no gradient in expectation, so it is left out; k3 or k1+ is usually meant")
    return PART


def kl_in_reward(value: object, values: Values) -> object:
    """The fate of use_kl_in_reward: with use_kl_loss, verl has a penalty in both places."""
    both = value and values[f"{ACTOR}.use_kl_loss"] and values["algorithm.kl_ctrl.kl_coef"] and values[f"{ACTOR}.kl_loss_coef"]
    return Lost("the KL has one place here; that of the loss was taken over") if both else PART


def filter_metric(value: object, values: Values) -> object:
    """The fate of filter_groups.metric: here groups are compared by the scores of their rewards, before any penalty."""
    if not values.get("algorithm.filter_groups.enable") or value in (None, "acc"):
        return PART
    if _overlong(values)[0] is not None and value in ("score", "reward", "seq_reward", "seq_final_reward"):
        return Lost("groups are compared by their scores without the penalty near the length limit, as with the metric acc")
    if value == "seq_final_reward" and values["algorithm.use_kl_in_reward"]:
        return Lost("groups are compared by their scores without the KL")
    return PART if value in ("score", "reward", "seq_reward", "seq_final_reward") else Lost("groups are compared by their scores")


def bypasses(values: Values) -> bool:
    """Whether ratios are those against the sampling policy."""
    names = (f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout", f"{ACTOR}.use_rollout_log_probs")
    return any(values.get(name) for name in names)


def _correction(values: Values) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    kind, threshold = values.get(f"{CORRECTION}.rollout_is"), values.get(f"{CORRECTION}.rollout_is_threshold", 2.0)
    cap = values.get(f"{ACTOR}.tis_imp_ratio_cap") or 0
    if kind == "token" and "_" in str(threshold):
        low, high = map(float, threshold.split("_"))
        found.append({"kind": "icepop", "low": low, "high": high})
    elif kind in ("token", "sequence"):
        found.append({"kind": f"{kind}_tis", "cap": float(threshold)})
    elif cap > 0:
        found.append({"kind": "token_tis", "cap": float(cap)})
    if str(values.get(f"{CORRECTION}.rollout_rs")) in MASKS:
        low, high = _bounds(values)
        found.append({"kind": "geometric_mask", "low": low, "high": high})
    if veto := values.get(f"{CORRECTION}.rollout_token_veto_threshold"):
        found.append({"kind": "veto", "low": float(veto)})
    return found


def _bounds(values: Values) -> tuple[float, float]:
    """The bounds of a rejection. A number alone is the upper one, and the lower one is its reciprocal."""
    threshold = str(values.get(f"{CORRECTION}.rollout_rs_threshold") or values.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
    if "_" in threshold:
        low, high = map(float, threshold.split("_"))
        return low, high
    lower = values.get(f"{CORRECTION}.rollout_rs_threshold_lower")
    return float(lower or 1 / float(threshold)), float(threshold)


def importance(value: object, values: Values) -> object:
    """The fate of rollout_is."""
    if value in (None, False, "null", "None"):
        return Off("no weights")
    if bypasses(values) and values.get(f"{CORRECTION}.loss_type") != "reinforce":
        return Off("without effect with bypass_mode")
    known = value in ("token", "sequence") and not bypasses(values)
    if value == "sequence" and "_" in str(values.get(f"{CORRECTION}.rollout_is_threshold")):
        known = False
    return PART if known else Lost("no counterpart of this weight; see algorithm.correction")


def rejection(value: object, values: Values) -> object:
    """The fate of rollout_rs."""
    if value in (None, False, "null", "None"):
        return Off("no rejection")
    if str(value) in MASKS and not bypasses(values):
        return PART
    return Lost("no counterpart of this rejection; algorithm.correction has geometric_mask and veto")


def _distillation(values: Values) -> Fixed:
    """On-policy distillation with the teacher's log-probabilities as advantages."""
    if not values.get(f"{DISTILLATION}.enabled"):
        return {}
    mode = values.get(f"{DISTILLATION}.distillation_loss.loss_mode", "k3")
    if mode not in ("k1", "kl") or not values.get(f"{DISTILLATION}.distillation_loss.use_policy_gradient"):
        raise refused(
            "distillation_loss that is a policy gradient", f"{mode}, a loss of its own", ["k1 with use_policy_gradient: true"]
        )
    coef = values.get(f"{DISTILLATION}.distillation_loss.distillation_loss_coef", 1.0)
    fixed: Fixed = {
        "algorithm.teacher_coef": (coef, "distillation_loss_coef"),
        "teacher.url": ("http://FILL-IN:8000/v1", "CHECK: start the teacher as a server, and name its address"),
    }
    if not values.get(f"{DISTILLATION}.distillation_loss.use_task_rewards", True):
        fixed["algorithm.preset"] = ("distillation", "use_task_rewards: false")
    return fixed


def _overlong(values: Values) -> tuple[object, str]:
    """DAPO's penalty near the length limit, of which verl counts the buffer in tokens."""
    name, limit = "reward_model.overlong_buffer", values["data.max_response_length"]
    tokens = values.get(f"{name}.len") or 0
    if not values.get(f"{name}.enable") or not tokens:
        return None, "no overlong_buffer"
    factor = values.get(f"{name}.penalty_factor", 1.0)
    return {"buffer": min(1.0, tokens / limit), "factor": factor}, f"overlong_buffer: {tokens} of {limit} tokens"
