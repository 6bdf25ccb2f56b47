"""The batch arithmetic of PaddleNLP: prompts, samples, optimizer steps and iterations.

`PPOTrainer.train` adds 1 to its global step at each optimizer step, and `max_steps`, `save_steps`, `eval_steps` and the schedule count these.

Invariant: pure functions of the values, with PaddleNLP's defaults for those that a file lacks.
"""

import math

from polyreme.import_config.convert import minibatches, product, ratio
from polyreme.import_config.rules import Noted, Off, Values


def samples(values: Values) -> int:
    """Samples of a prompt."""
    return int(values.get("rollout_n") or values.get("num_return_sequences") or 1)


def prompts(values: Values) -> int:
    """Prompts of an iteration."""
    if values.get("global_batch_size"):
        return int(values["global_batch_size"])
    return product(values["per_device_prompt_batch_size"], values.get("sharding_parallel_degree"))


def minibatches_of(values: Values) -> tuple[int, str]:
    """Optimizer steps of a pass over an iteration's samples, and their origin."""
    size = values.get("global_mini_batch_size")
    if size:
        why = "global_batch_size / global_mini_batch_size, both in prompts"
        return minibatches(prompts(values), size, why) if size > 0 else (1, why)
    step = product(
        values["per_device_train_batch_size"], values["gradient_accumulation_steps"], values.get("sharding_parallel_degree")
    )
    steps = ratio(prompts(values) * samples(values), step)
    return min(prompts(values), steps), "samples per generation / samples per optimizer step"


def per_iteration(values: Values) -> int:
    """Optimizer steps of an iteration."""
    return minibatches_of(values)[0] * int(values.get("update_iters") or 1)


def iterations(value: object, values: Values) -> object:
    """Optimizer steps as iterations, rounded up: PaddleNLP counts each step and stops after the iteration with the last one."""
    steps = per_iteration(values)
    if not isinstance(value, int | float) or value <= 0:
        return Off()
    return math.ceil(value / steps) if steps == 1 else Noted(math.ceil(value / steps), f"/ {steps} optimizer steps per iteration")


def interval(value: object, values: Values) -> object:
    """Optimizer steps between two saves or evaluations as iterations; 0: never."""
    return ratio(value, per_iteration(values)) if isinstance(value, int | float) and value > 0 else 0
