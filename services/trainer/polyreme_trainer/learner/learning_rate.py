"""The learning rate of iterations and of a stage's steps."""

import math

from polyreme.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int, skipped: int = 0) -> float:
    """The learning rate of iteration 1 .. iterations: linear warm-up to `lr`, then constant, or linear or cosine decay.

    A decay reaches `min_lr` one iteration after the last, so every iteration trains with a higher rate.

    Args:
        skipped: the number of iterations before the optimizer's first step. The schedule begins after them; their own rate is 0.
    """
    if iteration <= skipped:
        return 0.0
    iteration, iterations = iteration - skipped, iterations - skipped
    if iteration <= config.warmup:
        return config.lr * iteration / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (iteration - config.warmup - 1) / max(iterations - config.warmup, 1)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
