"""Loads the run's algorithm: its recipe, with the user's functions when `algorithm.source` is set.

Invariant: a user's functions have run once, on a synthetic batch, before they train a model.
"""

import importlib
from dataclasses import replace

import numpy as np
import torch

from polyreme.config.python_source import load_module
from polyreme.config.recipes.algorithm import AlgorithmSource
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.own import UserAlgorithm


def load_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ConfigError: the source differs from the run's, has no usable function, or has a function that fails on a synthetic batch.
    """
    source, turns = config.algorithm.source, 1 if config.environment is None else config.environment.max_turns
    most = turns * config.rollout.max_new_tokens
    longest = min(most, config.rollout.max_model_len)
    if source is None:
        return Algorithm(config.recipe, longest, most=most)
    code = source.code()
    module = importlib.import_module(source.module) if source.module else load_module(str(source.path), code)
    functions = [getattr(module, name, None) for name in ("advantages", "loss")]
    if not any(map(callable, functions)):
        raise ConfigError(f"a function `advantages` or `loss` in {source.path}", "neither", "Define one of them, or both.")
    algorithm = UserAlgorithm(config.recipe, longest, str(source.path), *functions, most=most)
    run_on_synthetic_batch(algorithm, source, config.group_size)
    return algorithm


def run_on_synthetic_batch(algorithm: UserAlgorithm, source: AlgorithmSource, group_size: int) -> None:
    """Runs the functions on a synthetic batch of two groups. Raises ConfigError when one fails or its result is unusable."""
    batch = synthetic_batch(algorithm, group_size)
    try:
        advantages = algorithm.advantages(batch)
        loss, _ = algorithm.loss(synthetic_inputs(algorithm, batch, advantages.advantages))
        loss.backward()
    except PolyremeError as error:
        raise ConfigError(error.expected, error.found, error.do) from None
    except Exception as error:
        raise ConfigError(
            f"functions in {source.path} that work on a batch", f"{type(error).__name__}: {error}", "Fix the function."
        ) from error


def synthetic_batch(algorithm: Algorithm, group_size: int) -> TokenBatch:
    """Two groups of responses of two to four tokens, all of them trained on, with every input that the recipe needs."""
    random, count, needs = np.random.default_rng(0), 2 * max(1, group_size), algorithm.needs
    offsets = np.concatenate([[0], np.cumsum(random.integers(2, 5, count))]).astype(np.int64)
    tokens = int(offsets[-1])

    def logprobs() -> np.ndarray:
        return -random.random(tokens, dtype=np.float32)

    batch = TokenBatch(
        offsets=offsets,
        mask=np.ones(tokens, dtype=np.float32),
        behaviour=logprobs(),
        version=np.zeros(tokens, dtype=np.int32),
        group=np.repeat(np.arange(2), count // 2),
        score=random.random(count),
        truncated=np.zeros(count, dtype=np.bool_),
        greedy=np.zeros(count, dtype=np.bool_),
        ids=random.integers(0, 9, tokens),
    )
    return replace(
        batch,
        old=logprobs() if needs.old else None,
        reference=logprobs() if needs.reference else None,
        teacher=logprobs() if needs.teacher else None,
        values=logprobs() if needs.critic else None,
        final_values=np.zeros(count, dtype=np.float32) if needs.final_values else None,
        parts=batch.score[:, None] if needs.parts else None,
        part_names=("score",) if needs.parts else (),
        part_weights=(1.0,) if needs.parts else (),
    )


def synthetic_inputs(algorithm: Algorithm, batch: TokenBatch, advantages: np.ndarray) -> LossInputs:
    """The batch as one micro-batch of one optimizer step."""
    behaviour = torch.from_numpy(batch.behaviour)
    logprobs = behaviour.clone().requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        old=behaviour,
        behaviour=behaviour,
        advantages=torch.from_numpy(advantages),
        weight=torch.full_like(behaviour, 1 / batch.tokens),
        sequence=torch.from_numpy(batch.sequence_of),
        sequences=len(batch),
        reference=None if batch.reference is None else torch.from_numpy(batch.reference),
        entropy=-logprobs if algorithm.needs.entropy else None,
        fresh=torch.ones(batch.tokens, dtype=torch.bool),
    )
