"""This rank's share of every batch: its sequences, in micro-batches.

Invariant: the data ranks' shares of a step are disjoint and together cover it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.megatron.batches.batch import Cost, IntArray, MicroBatch, Sequences, pack, plan_ranks
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.parallel.channel import FRAME
from polyreme_trainer.megatron.parallel.collectives import sum_over


@dataclass(frozen=True)
class DataShard:
    """This rank among the data-parallel ranks.

    Args:
        device: the device of the tensors.
        micro_batch_tokens: the largest number of tokens of a micro-batch.
        rank, ranks: this rank's number among the data-parallel ranks, and their count.
        group: the process group of the data-parallel ranks; None when there is one rank.
        stages: the process group of the stages that share this rank's micro-batches; None when the model is one stage.
    """

    device: torch.device
    micro_batch_tokens: int
    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None

    def micro_batches(
        self,
        sequences: Sequences,
        indices: IntArray,
        cost: Cost,
        multiple: int = 1,
        group: int = 1,
        joins_beginnings: bool = False,
        runs: Sequence[int] = (),
    ) -> Iterator[MicroBatch]:
        """This rank's share of `indices`. Every rank has the same number of micro-batches; some of them may be empty.

        Args:
            indices: the sequences. They contain all sequences of a row, one after the other.
            cost: the cost function of the model's sequences.
            multiple: the number of a micro-batch's positions is a multiple of this.
            group: the number of micro-batches is a multiple of this.
            joins_beginnings: see `pack`.
            runs: the number of sequences of each run that has adapters of its own. A micro-batch has the sequences of each run
                that it would have alone; several runs fit into one micro-batch. Empty: there is one run.
        """
        together = sequences.together
        rows = indices[::together] // together
        # The tokens and the cost of each row, whose sequences stay together.
        tokens, costs = (each.reshape(-1, together).sum(axis=1) for each in (sequences.lengths, cost.of(sequences.lengths)))
        plans = [
            plan_ranks(tokens, costs, part, self.ranks, self.micro_batch_tokens, group)[self.rank]
            for part in (np.split(rows, np.cumsum(runs)[:-1] // together) if runs else [rows])
        ]
        for parts in zip(*plans, strict=True):
            every = (np.concatenate(parts)[:, None] * together + np.arange(together)).ravel()
            sizes = [together * len(part) for part in parts] if runs else ()
            yield pack(sequences, every, self.device, multiple, joins_beginnings, sizes)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the data-parallel ranks and the stages in place, and returns it. Collective.

        If it comes from a model's output, the stages before the last have zeros.
        """
        for group in self.groups:
            sum_over(tensor, group)
        return tensor

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups over which results of micro-batches are spread: data-parallel ranks and stages, if several."""
        return ([self.group] if self.ranks > 1 else []) + ([self.stages] if self.stages is not None else [])

    def gather(self, payload: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
        """The payloads of all ranks of `group`, one of `groups`, by rank. Collective."""
        message = len(payload).to_bytes(8, "little") + payload
        found = self._gather(message[:FRAME].ljust(FRAME), group)
        ends = [8 + int.from_bytes(part[:8], "little") for part in found]
        if (rest := max(ends) - FRAME) > 0:
            found = [*map(bytes.__add__, found, self._gather(message[FRAME:].ljust(rest), group))]
        return [part[8:end] for part, end in zip(found, ends, strict=True)]

    def _gather(self, data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return [part.cpu().numpy().tobytes() for part in parts]


def data_shard(micro_batch_tokens: int, device: Device) -> DataShard:
    """This process's DataShard. Requires `init_parallel`."""
    return DataShard(
        device.torch,
        micro_batch_tokens,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group()
        if parallel_state.get_pipeline_model_parallel_world_size() > 1
        else None,
    )
