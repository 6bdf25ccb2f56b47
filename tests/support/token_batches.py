"""Ragged batches for the tests of the algorithms: random numbers, with masked gaps and sequences of different lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs


def offsets_of(lengths: list[int]) -> np.ndarray:
    """int64 [n + 1], the offsets of sequences with these numbers of predictions."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def ragged_mask(random: np.random.Generator, lengths: list[int]) -> np.ndarray:
    """float32 [t], a mask in which about two of three tokens are trained."""
    return (random.random(sum(lengths)) < 0.67).astype(np.float32)


def token_batch(seed: int, groups: int = 3, samples: int = 4, longest: int = 9, **fields: Any) -> TokenBatch:
    """Random scores and log-probabilities. Every sequence has at least one trained token. `fields` override random values."""
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
    """Random float64 tensors of sequences with these numbers of trained tokens, one advantage per sequence; `logprobs` requires a
    gradient."""
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


def full_batch(seed: int, equal_group: bool = True, **fields: object) -> TokenBatch:
    """A batch with every field that any recipe needs. Group 1 has equal scores."""
    batch = token_batch(seed)
    random = np.random.default_rng(seed + 1)
    score = np.where((batch.group == 1) & equal_group, 0.5, batch.score)
    parts = np.stack([score, 0.2 * score], 1)

    def near(scale: float) -> np.ndarray:
        return (batch.behaviour + random.normal(0, scale, batch.tokens)).astype(np.float32)

    made = {
        "score": score,
        "parts": parts,
        "part_names": ("a", "b"),
        "part_weights": (0.5, 1.0),
        "old": near(0.1),
        "reference": near(0.3),
        "teacher": near(0.3),
        "values": random.normal(size=batch.tokens).astype(np.float32),
        "final_values": random.normal(size=len(batch)).astype(np.float32),
        "ids": random.integers(0, 5, batch.tokens),
        "truncated": random.random(len(batch)) < 0.3,
    }
    return replace(batch, **{**made, **fields})  # type: ignore[arg-type]


def with_greedy(batch: TokenBatch) -> TokenBatch:
    """The batch with the first sample of every group as a greedy one."""
    greedy = np.zeros(len(batch), dtype=bool)
    greedy[np.unique(batch.group, return_index=True)[1]] = True
    return replace(batch, greedy=greedy, mask=np.where(greedy[batch.sequence_of], 0, batch.mask).astype(np.float32))
