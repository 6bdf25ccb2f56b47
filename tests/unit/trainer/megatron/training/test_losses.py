"""The losses of an optimizer step do not depend on the split into micro-batches and data ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyreme.config.recipes.presets import resolve
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import supervised
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.iteration import Iteration
from polyreme_trainer.megatron.training.losses import IterationLosses
from polyreme_trainer.megatron.training.roles import LossTerm, Role
from polyreme_trainer.megatron.training.step import mixed_terms
from support.table_model import Table

ALGORITHM = Algorithm(resolve("grpo", {"kl": None, "aggregation": "token-mean"}), longest=8)


def gradient_of_mixed_step(shards: list[DataShard]) -> torch.Tensor:
    """The gradient of one step on samples and supervised rows, summed over data ranks that each have a shard."""
    random = np.random.default_rng(3)
    ids = [random.integers(0, 9, length).astype(np.int32) for length in (3, 7, 5, 2)]
    masks = [np.ones(len(x), np.uint8) for x in ids]
    samples = [
        SampleRecord(x, np.full(len(x), -1.0, np.float32), mask, 1, [(1, 0, len(x))], score)
        for x, mask, score in zip(ids, masks, (0.0, 1.0, 0.3, 0.7), strict=True)
    ]
    sequences, tokens = collect([GroupRecord(0, 1, ids[0], samples)])
    batch = Iteration(2, sequences, tokens, [np.arange(4)], AlgorithmState(), 1e-3, mixed=[supervised(ids, masks)], ptx_coef=0.7)
    advantages, total = ALGORITHM.advantages(tokens), torch.zeros(9, dtype=torch.float64)
    for shard in shards:
        model: Any = Table()
        actor = Role("actor", model, model.forward, shard)
        actor.optimizer = model
        every = np.arange(4)
        policy = LossTerm(sequences, every, IterationLosses(batch, ALGORITHM, tokens, advantages).policy(every))
        actor.forward_backward(policy, *mixed_terms(batch, 0, SimpleNamespace(supervised_logprobs=None)))
        total += torch.zeros(9) if model.table.grad is None else model.table.grad
    return total


@pytest.mark.parametrize(
    "shards", [[(0, 1, 7)], [(0, 1, 14)], [(0, 2, 64), (1, 2, 64)], [(rank, 6, 8) for rank in range(6)]], ids=str
)
def test_mixed_rows_have_one_gradient_over_micro_batches_and_data_ranks(shards: list[tuple[int, int, int]]) -> None:
    """This holds even if a rank has no sequence."""
    cpu = torch.device("cpu")
    expected = gradient_of_mixed_step([DataShard(cpu, 4096)])
    found = gradient_of_mixed_step([DataShard(cpu, tokens, rank, ranks) for rank, ranks, tokens in shards])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
