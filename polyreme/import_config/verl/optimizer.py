"""The optimizers of verl's actor and critic, as our keys.

FSDP and Megatron have different keys for the same settings: verl/trainer/config/optim/*.yaml.

Invariant: every setting is in the result, so that none of our defaults takes effect instead of verl's. Pure.
"""

import math
from typing import Any

from polyreme.import_config.rules import ITERATIONS, Fixed, Values, one_of
from polyreme.import_config.verl.engine_keys import engine_of

_MINIMA = ("min_lr", "lr_min", "min_lr_ratio", "min_lr_factor")
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
schedule = one_of(SCHEDULES, None)
"""The fate of a key with the schedule's name."""


def optimizer(section: str, target: str, values: Values) -> Fixed:
    """All settings of the optimizer of `section`, so that none of ours takes effect instead."""

    def of(name: str, usual: Any) -> Any:
        value = values.get(f"{section}.optim.{name}")
        return usual if value is None else value

    titan = engine_of(values) == "torchtitan"  # its rate always falls, by default linearly
    lr, betas = values[f"{section}.optim.lr"], of("betas", [0.9, 0.999])
    style = of("decay_type", "linear") if titan else of("lr_scheduler_type", of("warmup_style", of("lr_decay_style", "constant")))
    warmup, why = _warmup(section, values)
    found = {
        "lr": (lr, f"lr: {lr}"),
        "schedule": (
            SCHEDULES.get(style, "constant"),
            f"lr_scheduler_type, formerly warmup_style, lr_decay_style or decay_type: {style}",
        ),
        "min_lr": (_min_lr(section, values), "min_lr or lr_min, or min_lr_ratio or min_lr_factor x lr"),
        "warmup": (warmup, why),
        "weight_decay": (of("weight_decay", 0.01), "weight_decay"),
        "beta1": (betas[0], "betas"),
        "beta2": (betas[1], "betas"),
        "eps": (of("eps", 1e-8), "eps of Adam in verl"),
        "clip_grad": (_clip_grad(section, values), "grad_clip, or optim.clip_grad with Megatron"),
    }
    return {f"{target}.{name}": (value, f"{section}.optim: {why}") for name, (value, why) in found.items()}


def _warmup(section: str, values: Values) -> tuple[int, str]:
    steps, part = values.get(f"{section}.optim.lr_warmup_steps"), values.get(f"{section}.optim.lr_warmup_steps_ratio") or 0
    if steps is not None and steps > 0:
        return int(steps), "lr_warmup_steps, iterations in both; verl's rate is one iteration behind, so its first is 0"
    if not part:
        return 0, "no lr_warmup_steps and no lr_warmup_steps_ratio"
    iterations = values.get(ITERATIONS, 0)
    return math.floor(part * iterations), f"lr_warmup_steps_ratio: {part} x {iterations} iterations; verl's first rate is 0"


def _min_lr(section: str, values: Values) -> float:
    lr, (least, other, part, factor) = values[f"{section}.optim.lr"], (values.get(f"{section}.optim.{name}") for name in _MINIMA)
    least = other if least is None else least
    if least is None:
        least = lr * (part or factor or 0.0)
    return float(min(least, lr))


def _clip_grad(section: str, values: Values) -> float:
    own, shared = values.get(f"{section}.optim.clip_grad"), values.get(f"{section}.grad_clip")
    return float(next((value for value in (own, shared) if value not in (None, 1.0)), 1.0))
