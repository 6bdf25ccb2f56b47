"""The batch arithmetic of TRL: completions, optimizer steps and iterations, and which trainer reads the values.

Invariant: pure functions of the values, with TRL's defaults for those that a file lacks.
"""

import math

from polyreme.import_config.convert import part_of_run, product, ratio
from polyreme.import_config.hugging_face import without_warmup
from polyreme.import_config.rules import Fixed, Noted, Off, Values

TRAINER = "(trainer)"
"""Among the values: `grpo` or `rloo`, if the name of the file or program says which trainer reads it."""
RLOO_KEYS = ("normalize_advantages", "reward_clip_range")


def is_rloo(values: Values) -> bool:
    """Whether the values are those of RLOOConfig."""
    return values.get(TRAINER) == "rloo" or any(key in values for key in RLOO_KEYS)


def older(values: Values) -> bool:
    """Whether the values are of a version before 1.0, which had a limit of prompts and other defaults."""
    return "max_prompt_length" in values


def generations(values: Values) -> int:
    """Completions of a prompt."""
    return int(values.get("num_generations") or (2 if is_rloo(values) else 8))


def _per_step(values: Values) -> int:
    """Completions of an optimizer step."""
    factors = (values["per_device_train_batch_size"], values.get("num_processes"), values["gradient_accumulation_steps"])
    return product(*factors)


def _completions(values: Values) -> int:
    """Completions of an iteration: of a generation, or of the generations that an optimizer step accumulates."""
    given, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    once = product(values["per_device_train_batch_size"], values.get("num_processes"))
    return max(int(given or once * (steps or values["gradient_accumulation_steps"])), _per_step(values))


def updates(values: Values) -> int:
    """Optimizer steps of a pass over an iteration's completions."""
    return ratio(_completions(values), _per_step(values))


def per_iteration(values: Values) -> int:
    """Optimizer steps of an iteration."""
    return updates(values) * int(values.get("num_iterations") or 1)


def batches(values: Values) -> Fixed:
    completions, each, steps = _completions(values), generations(values), updates(values)
    prompts = ratio(completions, each)
    processes = "" if values.get("num_processes") else ". CHECK: the file does not say how many processes there are: 1 is assumed"
    why = f"{completions} completions per generation (per_device_train_batch_size x num_processes x gradient_accumulation_steps)"
    return {
        "group_size": (each, "num_generations"),
        "groups_per_iteration": (prompts, f"{why} / num_generations{processes}"),
        "algorithm.minibatches": (min(steps, prompts), "steps_per_generation / gradient_accumulation_steps"),
        "trainer.parallel.data": (product(values.get("num_processes")), f"num_processes{processes}"),
    }


def steps(value: object, values: Values) -> object:
    """Optimizer steps, or a part of the run below 1, as iterations."""
    if isinstance(value, float) and 0 < value < 1:
        return part_of_run(value, values)
    if not isinstance(value, int | float) or value <= 0:
        return Off("not set")
    return ratio(value, per_iteration(values))


def warmup_steps(value: float, values: Values) -> object:
    """Optimizer steps of warm-up, or a part of the run below 1, as iterations; rounded up, so that a warm-up remains one."""
    if not value or without_warmup(values, "lr_scheduler_type"):
        return Off("none")
    if 0 < value < 1:
        return part_of_run(value, values)
    return Noted(math.ceil(value / per_iteration(values)), f"/ {per_iteration(values)} optimizer steps per iteration")
