"""Micro-batches through a model whose layers may be cut into stages, one per pipeline rank.

With several stages, megatron-core's schedule passes hidden states forwards and gradients backwards between the ranks (one forward, one
backward). Only the last stage has the model's output, so only there a job's `compute` is called.

Invariant: a job's `compute` sees the model as if it were whole: `ShardedModel.hidden` of the job's ids returns final hidden states.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.mcore import forward_backward_pipelining_without_interleaving, parallel_state
from polyreme_trainer.megatron.model import ShardedModel
from polyreme_trainer.megatron.packing import PackedIds


@dataclass(frozen=True)
class Job:
    """One micro-batch.

    Attributes:
        ids: the model's inputs, packed or int64 [b, s].
        compute: computes with the model's output for `ids` a scalar, which is differentiated.
        context: what surrounds the micro-batch's forward pass.
    """

    ids: Tensor | PackedIds
    compute: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def run_whole(jobs: Iterable[Job], backward: bool) -> None:
    """Runs jobs one after the other on a model that one stage holds. `backward`: whether to differentiate."""
    for job in jobs:
        with job.context():
            value = job.compute()
        if backward:
            value.backward()


def run_stages(model: ShardedModel, jobs: Iterable[Job], backward: bool) -> None:
    """Runs jobs through all stages. Collective over them, with the same jobs on each."""
    every = list(jobs)
    if not every:
        return
    last = model.rank.pp_rank == model.rank.pp - 1

    def forward(queue: Any, _module: Any) -> tuple[Tensor, None]:
        job = next(queue)
        with job.context():
            return (job.compute() if last else model.hidden(job.ids)), None

    with model.device.megatron():
        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward,
            data_iterator=iter(every),
            model=model.module,
            num_microbatches=len(every),
            seq_length=1,  # the stages send each other the true shapes (`variable_seq_lengths`)
            micro_batch_size=1,
            forward_only=not backward,
        )


@torch.no_grad()
def on_every_stage(model: ShardedModel, ids: Tensor, compute: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    """`compute()` of the last stage, float32 of `shape`, on all stages. Collective over them."""
    if model.rank.pp == 1:
        return compute()
    result = torch.empty(shape, dtype=torch.float32, device=ids.device)

    def keep() -> Tensor:
        result.copy_(compute())
        return result.new_zeros(())

    run_stages(model, [Job(ids, keep)], backward=False)
    torch.distributed.broadcast(
        result, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group()
    )
    return result
