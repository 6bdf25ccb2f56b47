"""Runs in the ranks of test_collectives."""

from typing import Any

import torch
import torch.distributed as dist

from polyreme_trainer.megatron.parallel.channel import FRAME, BroadcastChannel
from polyreme_trainer.megatron.parallel.collectives import sum_over
from polyreme_trainer.megatron.parallel.shard import DataShard


def sum_on_a_backend_without_float64() -> None:
    """Sums as on HCCL, whose reductions take no float64."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    all_reduce = dist.all_reduce

    def hccl_all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        assert tensor.dtype != torch.float64
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = hccl_all_reduce
    exact = torch.tensor([[2.0**53, float(rank)], [2.0**-30, 1.0]], dtype=torch.float64)
    assert sum_over(exact, None) is exact
    assert exact.tolist() == [[ranks * 2.0**53, sum(range(ranks))], [ranks * 2.0**-30, ranks]]
    whole = torch.full((3,), float(rank + 1))
    assert sum_over(whole, None) is whole
    assert whole.tolist() == [ranks * (ranks + 1) / 2] * 3
    dist.destroy_process_group()


def exchange_bytes_of_any_length() -> None:
    """Rank 0 sends payloads around the length of one exchange; then the ranks gather those, each another one."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = [0, 1, *range(FRAME - 18, FRAME + 3), 3 * FRAME]
    payloads = [bytes(index % 251 for index in range(length)) for length in lengths]
    channel = BroadcastChannel(torch.device("cpu"))
    for kind, payload in enumerate(payloads):
        if rank == 0:
            channel.send(kind, payload)
        else:
            assert channel.receive() == (kind, payload)
    shard = DataShard(torch.device("cpu"), 1, rank, ranks, dist.group.WORLD, None)
    for first in range(len(payloads)):
        given = [payloads[(first + other) % len(payloads)] for other in range(ranks)]
        assert shard.gather(given[rank], dist.group.WORLD) == given
    dist.destroy_process_group()
