"""Sequences that belong together are never separated, and every sequence is run once."""

import numpy as np
import pytest
import torch

from polyreme_trainer.megatron.batches.batch import Cost, Sequences, with_end
from polyreme_trainer.megatron.parallel.shard import DataShard

COST = Cost(attention=1e-3)


def sequences(count: int, together: int) -> Sequences:
    random = np.random.default_rng(count)
    ids = [np.arange(1, n + 1, dtype=np.int64) for n in random.integers(2, 20, count)]
    return Sequences(ids, np.ones(sum(len(each) - 1 for each in ids), dtype=np.float32), together)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 24, 64, 10_000])
def test_pairs_stay_in_one_micro_batch(ranks: int, budget: int) -> None:
    whole = sequences(18, together=2)
    seen = []
    for rank in range(ranks):
        shard = DataShard(torch.device("cpu"), budget, rank, ranks)
        for batch in shard.micro_batches(whole, np.arange(len(whole)), COST):
            pairs = batch.indices.reshape(-1, 2)
            assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
            assert len(pairs) <= 1 or int(whole.lengths[batch.indices].sum()) <= budget
            seen += batch.indices.tolist()
    assert sorted(seen) == list(range(len(whole)))


def test_one_by_one_is_as_it_was() -> None:
    whole, shard = sequences(9, together=1), DataShard(torch.device("cpu"), 40)
    indices = np.array([1, 3, 4, 8])
    assert sorted(i for batch in shard.micro_batches(whole, indices, COST) for i in batch.indices.tolist()) == indices.tolist()


def test_an_end_keeps_pairs_together() -> None:
    assert with_end(sequences(4, together=2)).together == 2
