"""Our keys that follow from several keys of TRL: lengths, rewards, data, several turns, and the other modules' parts.

Invariant: pure functions of the values, with TRL's defaults for what a file lacks. Every reward that a configuration names is in
the result: as ours, as the module that it names, as a penalty of the response length, or as a file that the user must write.
"""

from typing import Any

from polyreme.import_config.convert import path, placeholder, ratio
from polyreme.import_config.environments import CLASS, PLACEHOLDER
from polyreme.import_config.rules import Fixed, ForeignEnvironment, Lost, Noted, Off, Unresolved, Values
from polyreme.import_config.trl_algorithm import grpo, rloo
from polyreme.import_config.trl_batches import batches, is_rloo, older, per_iteration

Reward = dict[str, Any]
"""The keys of a reward."""
MATH = ("accuracy_reward", "accuracy", "reasoning_accuracy_reward", "reasoning_accuracy")
OVERLONG = ("get_soft_overlong_punishment", "soft_overlong_punishment", "soft_overlong_punishment_reward")
_FORMATS: dict[str, dict[str, object]] = {
    "think_format_reward": {"options": {"answer": None}},
    "think_format": {"options": {"answer": None}},
    "format_reward": {},
    "format": {},
}
_CODE = ("code", "code_reward", "binary_code", "binary_code_reward")
_REPETITION = ("repetition_penalty", "repetition_penalty_reward", "get_repetition_penalty_reward")
OWN = "(functions)"
"""Among the values: names of rewards that a Python script defines itself."""
_REGISTERED = (1280, 256)
"""Limit and margin of `trl grpo`'s own overlong punishment, in tokens."""


def fixed(values: Values) -> Fixed:
    """Our keys with their origin."""
    found: Fixed = {
        "device": ("cuda", "the usual device"),
        "model.dtype": ("float32" if values.get("bf16") is False else "bfloat16", "bf16, by default true"),
        "reward.rewards": rewards(values, completion_tokens(values)),
        "data.label_key": ("solution", "CHECK: TRL passes every column to the reward; name the one with reference answers"),
        **batches(values),
        **_lengths(values),
        **(rloo(values) if is_rloo(values) else grpo(values)),
    }
    if older(values) and "temperature" not in values:
        found["rollout.temperature"] = (1.0, "TRL's default since 0.18. CHECK: 0.9 before")
    if (overlong := shaping(values, completion_tokens(values))) is not None:
        found["algorithm.shaping.overlong"] = (overlong, "reward_funcs, reward_weights: the soft overlong punishment")
    return found


def completion_tokens(values: Values) -> int:
    """The longest completion."""
    return int(values.get("max_completion_length") or (256 if older(values) else 512))


def _lengths(values: Values) -> Fixed:
    longest, limit = completion_tokens(values), values.get("max_prompt_length") or 1024
    unlimited = "" if values.get("max_prompt_length") else "CHECK: TRL has no limit; "
    found: Fixed = {
        "rollout.max_new_tokens": (longest, "max_completion_length"),
        "data.max_prompt_tokens": (limit, f"{unlimited}longer prompts are left out"),
        "rollout.max_model_len": (limit + longest, "prompt and completion"),
    }
    return found


def reference(value: object, values: Values) -> object:
    """The renewal of the reference, which here is complete."""
    if not value or not values.get("beta", 0.05 if is_rloo(values) else 0.0):
        return Off("the reference stays the initial model")
    if values.get("ref_model_mixup_alpha", 0.6) != 1:
        return Lost("the reference is replaced here, not mixed: see algorithm.kl.renew_interval; it stays the initial model")
    return ratio(values.get("ref_model_sync_steps", 512), per_iteration(values))


def datasets(value: object, values: Values) -> object:
    """A mixture of data sets as a list of paths."""
    if isinstance(value, Unresolved) or not isinstance(value, list):
        return value
    names = [each.get("path") or each.get("id") or each.get("name") if isinstance(each, dict) else each for each in value]
    if not names or not all(isinstance(name, str) for name in names):
        return Lost("data sets without a path; name their files in data.train")
    parts = [each for each in value if isinstance(each, dict) and set(each) - {"path", "id", "name"}]
    checked = "CHECK: local paths or names of the hub" + (
        "; their splits, columns and fractions are yours to prepare" if parts else ""
    )
    return Noted(names[0] if len(names) == 1 else names, checked)


def environment(values: Values) -> ForeignEnvironment | None:
    """The tools or environment of a run of several turns. An answer follows each round of calls."""
    key = next(
        (key for key in ("environment_factory", "rollout_func", "tools", "max_tool_calling_iterations") if values.get(key)), None
    )
    if key is None:
        return None
    calls = values.get("max_tool_calling_iterations")
    return ForeignEnvironment(
        file=PLACEHOLDER,
        origin=f"{key}: {values[key]}",
        turns=calls + 1 if calls else None,
        turns_origin="max_tool_calling_iterations + 1",
        key=key,
        value=values[key],
        loss=f"tools and several turns: write them as {CLASS}",
    )


def rewards(values: Values, longest: int) -> tuple[list[Reward], str]:
    """The rewards, and what to check about them. `longest` is the largest number of tokens of a completion."""
    found: dict[str, Reward] = {}
    checks = []
    for name, weight in _named(values):
        if name == "(model)":
            model = values["reward_model_name_or_path"]
            spec: Reward
            spec, check = {"model": path(model, values)}, "a reward model is a local path or a name of the hub"
        elif overlong(name, values, longest):
            checks.append(f"{name}: the penalty algorithm.shaping.overlong, in tokens")
            continue
        else:
            spec, check = _reward(name, values)
        key = str(spec.get("name") or spec.get("model"))
        factor = spec.pop("factor", 1.0)
        found[key] = {**spec, "weight": found.get(key, {"weight": 0.0})["weight"] + weight * factor}
        checks.append(check)
    if not found:
        return [placeholder("reward")], "CHECK: the file names no reward" + "".join(f"; {check}" for check in checks)
    return list(found.values()), "reward_funcs, reward_weights. CHECK: " + "; ".join(dict.fromkeys(filter(None, checks)))


def _named(values: Values) -> list[tuple[str, float]]:
    """Names and weights in TRL's order: the reward model is first."""
    given = values.get("reward_funcs") or []
    names = given if isinstance(given, list) else [given]
    names = ["(model)"] * bool(values.get("reward_model_name_or_path")) + [str(name) for name in names]
    weights = values.get("reward_weights")
    weights = weights if isinstance(weights, list) else [weights] if isinstance(weights, int | float) else []
    return list(zip(names, [*weights, *[1.0] * len(names)], strict=False))


def _reward(name: str, values: Values) -> tuple[Reward, str]:
    last = name.rpartition(".")[2]
    if isinstance(values.get("reward_funcs"), Unresolved):
        return placeholder("reward"), f"the file does not say what {name} is"
    if name in values.get(OWN, ()):
        return placeholder(name), f"{name} is a function of the script: see the list of losses"
    if "." in name and not name.startswith(("trl.rewards.", "open_r1.rewards.")):
        return {"name": last, "module": name.rpartition(".")[0], "function": last}, f"{name} must be importable on this machine"
    if last in MATH:
        return {"name": "math"}, "math reads the label of data.label_key"
    if last in _FORMATS:
        return {"name": "think_format", **_FORMATS[last]}, ""
    if last in _CODE:
        return {"name": "code"}, "code reads the tests of a row in its column `tests`"
    if last in _REPETITION:
        size, penalty = (
            value if isinstance(value := values.get(key), int | float) else usual
            for key, usual in (("repetition_n_grams", 3), ("repetition_max_penalty", -1.0))
        )
        return {"name": "repetition", "options": {"size": size}, "factor": abs(penalty)}, "repetition counts words"
    return placeholder(last), f"{name} has no counterpart: write it as the function of FILL_IN/{placeholder(last)['name']}.py"


def overlong(name: str, values: Values, longest: int) -> dict[str, float] | None:
    """The penalty near the length limit if the named reward is one and its limit is that of generation."""
    if name.rpartition(".")[2] not in OVERLONG or name in values.get(OWN, ()):
        return None
    limit, margin = (
        values.get(key, usual) for key, usual in zip(("max_completion_len", "soft_punish_cache"), _REGISTERED, strict=True)
    )
    weight = dict(_named(values))[name]
    if limit != longest or weight <= 0:
        return None
    return {"buffer": min(1.0, margin / limit), "factor": weight}


def shaping(values: Values, longest: int) -> dict[str, float] | None:
    """The penalty of the response's length among the rewards; None: there is none."""
    return next((found for name, _ in _named(values) if (found := overlong(name, values, longest))), None)
