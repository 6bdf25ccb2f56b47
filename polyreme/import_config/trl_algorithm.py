"""The algorithm of TRL's GRPO and RLOO as our keys: advantage, loss, KL, correction."""

from polyreme.errors import ConfigError
from polyreme.import_config.convert import refused
from polyreme.import_config.rules import Fixed, Lost, Values
from polyreme.import_config.trl_batches import TRAINER, older, per_iteration

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""Our aggregation for each loss type."""
FLOOR = 1e-4
"""Added to the deviation of scores."""
UNBOUNDED = 1e9
"""A cap of importance weights that is never reached."""
GRPO_KEYS = (
    "loss_type",
    "scale_rewards",
    "importance_sampling_level",
    "delta",
    "multi_objective_aggregation",
    "top_entropy_quantile",
)


def grpo(values: Values) -> Fixed:
    parts = values.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum"
    preset = ("gdpo", "multi_objective_aggregation") if parts else ("grpo", _which_trainer(values))
    return {"algorithm.preset": preset, **_advantage(values, parts), **_loss(values), **_kl(values), **_correction(values)}


def _which_trainer(values: Values) -> str:
    known = values.get(TRAINER) or any(key in values for key in GRPO_KEYS if key != "loss_type")
    return "GRPOConfig" if known else "GRPOConfig. CHECK: a file of `trl rloo` can look the same; its preset is rloo"


def _advantage(values: Values, parts: bool) -> Fixed:
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(values["scale_rewards"], values["scale_rewards"])
    if scale not in ("group", "batch", "none"):
        raise refused("scale_rewards", scale, ("group", "batch", "none"))
    if parts:
        return {
            "algorithm.advantage": ({"kind": "per_part", "std_floor": FLOOR, "ddof": 1, "whiten": True}, "normalize_then_sum")
        }
    if scale == "group":
        return {"algorithm.advantage": ({"kind": "group_norm", "std_floor": FLOOR, "ddof": 1}, "scale_rewards: group")}
    batch = scale == "batch"
    check = (
        "; CHECK: TRL divides by the deviation of the batch's scores, here that of the advantages over tokens" if batch else ""
    )
    return {"algorithm.advantage": ({"kind": "group_mean", "whiten": batch}, f"scale_rewards: {scale}{check}")}


def _loss(values: Values) -> Fixed:
    kind, level = values.get("loss_type", "dapo"), values.get("importance_sampling_level", "token")
    if kind not in AGGREGATIONS:
        raise refused("a loss_type", kind, AGGREGATIONS)
    if level not in ("token", "sequence"):
        raise refused("an importance_sampling_level", level, ("token", "sequence"))
    if level == "sequence" and AGGREGATIONS[kind] != "seq-mean-token-mean":
        raise ConfigError(
            "loss_type grpo with importance_sampling_level sequence, whose loss is one number per response",
            kind,
            "Set loss_type: grpo (GSPO), or importance_sampling_level: token.",
        )
    return {
        "algorithm.aggregation": (AGGREGATIONS[kind], f"loss_type: {kind}{_age_of_loss(values)}"),
        "algorithm.loss": _clip(kind, level, values),
    }


def _age_of_loss(values: Values) -> str:
    unsure = older(values) and "loss_type" not in values
    return (
        ", TRL's default since 0.22, and bnpo is the same here. CHECK: grpo (seq-mean-token-mean) before 0.17" if unsure else ""
    )


def _clip(kind: str, level: str, values: Values) -> tuple[object, str]:
    low, high = values["epsilon"], values.get("epsilon_high")
    if kind == "cispo":
        bound = low if high is None else high
        if bound <= 1:
            raise ConfigError(
                "epsilon_high above 1 with loss_type cispo, where it is the largest weight itself",
                f"{bound:g}: every weight would be {bound:g}",
                "Set epsilon_high; 5.0 is usual.",
            )
        return {
            "kind": "cispo",
            "low": 1.0,
            "high": bound - 1,
        }, f"cispo: the weight is at most epsilon_high = {bound:g} = 1 + high"
    if kind == "sapo":
        positive, negative = values.get("sapo_temperature_pos", 1.0), values.get("sapo_temperature_neg", 1.05)
        return {"kind": "sapo", "tau_positive": positive, "tau_negative": negative}, "sapo_temperature_pos, sapo_temperature_neg"
    bounds = {"kind": "clip", "low": low, "high": low if high is None else high, "dual": values.get("delta"), "ratio": level}
    return bounds, "epsilon, epsilon_high, delta, importance_sampling_level"


def _kl(values: Values) -> Fixed:
    beta = values.get("beta") or 0.0
    if not beta:
        check = ", TRL's default since 0.19. CHECK: 0.04 before" if older(values) and "beta" not in values else ""
        return {"algorithm.kl": (None, f"beta: 0, no reference model{check}")}
    corrected = values.get("use_bias_correction_kl", not older(values))
    why = "use_bias_correction_kl: the gradient of the reverse KL" if corrected else "without use_bias_correction_kl"
    given = "" if "use_bias_correction_kl" in values else ", by TRL's default" + (" before 1.0" if older(values) else "")
    return {"algorithm.kl": ({"place": "loss", "estimator": "k3+" if corrected else "k3", "coef": beta}, f"beta; {why}{given}")}


def _correction(values: Values) -> Fixed:
    if not values.get("use_vllm"):
        return {"algorithm.correction": ("auto", "without use_vllm nothing is corrected there; replicas always run vLLM")}
    if not values.get("vllm_importance_sampling_correction", not _before_correction(values)):
        return {"algorithm.correction": ([], "vllm_importance_sampling_correction: off")}
    mode = values.get("vllm_importance_sampling_mode", "sequence_mask")
    high = values.get("vllm_importance_sampling_clip_max", values.get("vllm_importance_sampling_cap", 3.0))
    low = values.get("vllm_importance_sampling_clip_min")
    cap = UNBOUNDED if high is None else high
    raised = f". CHECK: TRL also raises weights to {low:g}" if low else ""
    origin = f"vllm_importance_sampling_mode: {mode}, at most {cap:g}"
    if mode == "token_mask":
        return {"algorithm.correction": ([{"kind": "icepop", "low": low or 0.0, "high": cap}], origin)}
    if mode == "token_truncate":
        return {"algorithm.correction": ([{"kind": "token_tis", "cap": cap}], origin + raised)}
    if mode == "sequence_truncate":
        return {"algorithm.correction": ([{"kind": "sequence_tis", "cap": cap}], origin + raised)}
    if mode == "sequence_mask":
        note = ". CHECK: TRL leaves out a sequence beyond the bound; here its weight is bounded"
        return {"algorithm.correction": ([{"kind": "sequence_tis", "cap": cap}], origin + note)}
    raise refused("a vllm_importance_sampling_mode", mode, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))


def _before_correction(values: Values) -> bool:
    """Whether the file has keys of the versions before the correction."""
    return "vllm_device" in values or "vllm_max_model_len" in values or isinstance(values.get("scale_rewards"), bool)


def rloo(values: Values) -> Fixed:
    beta = values.get("beta", 0.05)
    low, high = values["epsilon"], values.get("epsilon_high")
    kl: Fixed = {"algorithm.kl": (None, "beta: 0, no reference model")}
    if beta:
        kl = {"algorithm.kl": ({"place": "reward", "estimator": "k1", "coef": beta}, "beta: the KL of a completion in its score")}
    ratios = "epsilon; with one optimizer step per iteration no ratio is clipped"
    if per_iteration(values) > 1:
        ratios = "epsilon. CHECK: TRL clips the ratio of whole completions, here that of tokens"
    found: Fixed = {
        "algorithm.preset": ("rloo", "RLOOConfig"),
        "algorithm.loss": ({"kind": "clip", "low": low, "high": low if high is None else high}, ratios),
        "algorithm.aggregation": ("seq-mean-token-sum", "the log-probability of a completion is the sum over its tokens"),
        "algorithm.correction": ([], "RLOO corrects nothing"),
        **kl,
    }
    if values.get("normalize_advantages"):
        found["lost"] = (Lost("advantages are not normalised over the batch with leave_one_out"), "normalize_advantages")
    return found
