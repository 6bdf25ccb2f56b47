"""Our keys that follow from several keys of TRL: lengths, rewards, data, several turns, and the other modules' parts.

Invariant: pure functions of the values, with TRL's defaults for those that a file lacks.
"""

from polyreme.import_config.convert import ratio
from polyreme.import_config.environments import CLASS, PLACEHOLDER
from polyreme.import_config.rules import ForeignEnvironment, Lost, Noted, Off, Unresolved, Values
from polyreme.import_config.trl_algorithm import grpo, rloo
from polyreme.import_config.trl_batches import Fixed, batches, is_rloo, older, per_iteration
from polyreme.import_config.trl_rewards import rewards, shaping


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
