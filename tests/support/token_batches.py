"""Ragged batches for the tests of the algorithms: made up of random numbers, with masked gaps and sequences of every length."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs


def offsets_of(lengths: list[int]) -> np.ndarray:
    """int64 [n + 1] of sequences with so many predictions each."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def ragged_mask(random: np.random.Generator, lengths: list[int]) -> np.ndarray:
    """float32 [t], about two of three tokens trained."""
    return (random.random(sum(lengths)) < 0.67).astype(np.float32)


def token_batch(seed: int, groups: int = 3, samples: int = 4, longest: int = 9, **fields: Any) -> TokenBatch:
    """Random scores and log-probabilities; every sequence has at least one trained token. `fields` replace what is made up."""
    random = np.random.default_rng(seed)
    n = groups * samples
    lengths = [int(x) for x in random.integers(1, longest + 1, n)]
    offsets = offsets_of(lengths)
    mask = ragged_mask(random, lengths)
    mask[offsets[1:] - 1 - random.integers(0, lengths)] = 1
    arrays = {
        "offsets": offsets,
        "mask": mask,
        "behaviour": -random.exponential(1.0, sum(lengths)).astype(np.float32),
        "version": np.zeros(sum(lengths), dtype=np.int32),
        "group": np.repeat(np.arange(groups, dtype=np.int64), samples),
        "score": random.normal(size=n),
        "truncated": np.zeros(n, dtype=bool),
        "greedy": np.zeros(n, dtype=bool),
    }
    return TokenBatch(**{**arrays, **fields})


def loss_inputs(seed: int, lengths: list[int], **fields: Any) -> LossInputs:
    """Random float64 tensors of sequences with so many trained tokens, one advantage per sequence; `logprobs` carries a gradient."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    t = len(sequence)

    def normal(scale: float, size: int = t) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = -torch.rand(t, generator=generator, dtype=torch.float64) * 3
    tensors = {
        "logprobs": (old + normal(0.3)).requires_grad_(True),
        "old": old,
        "behaviour": old + normal(0.3),
        "advantages": normal(1.0, len(lengths))[sequence],
        "weight": torch.rand(t, generator=generator, dtype=torch.float64) / t,
        "reference": old + normal(0.5),
        "sequence": sequence,
        "sequences": len(lengths),
    }
    return LossInputs(**{**tensors, **fields})
