"""Micro-batches through a model whose layers may be cut into stages, one per pipeline rank.

With several stages, megatron-core's schedules pass hidden states forwards and gradients backwards between the ranks (one forward,
one backward; interleaved where a rank has several chunks of the model). Only the last stage's last chunk has the model's output,
so only there a job's `output` and `loss` are called.

Invariant: a job's `output` sees the model as if whole: `ShardedModel.hidden` of the job's ids returns final hidden states.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.mcore import (
    GPTModel,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    parallel_state,
)
from polyreme_trainer.megatron.models.model import ShardedModel

T = TypeVar("T")


@dataclass(frozen=True)
class Job(Generic[T]):
    """One micro-batch.

    Attributes:
        ids: the model's inputs, packed or int64 [b, s].
        output: computes the model's output for `ids`.
        loss: maps the output to a scalar, which is differentiated, and a result, or None without any.
        context: the context manager of the micro-batch's forward pass.
    """

    ids: Tensor | PackedIds
    output: Callable[[], Tensor]
    loss: Callable[[Tensor], tuple[Tensor, T | None]]
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def run(model: ShardedModel, jobs: Iterable[Job[T]], backward: bool) -> list[T]:
    """Runs jobs one after the other, or through the stages of the model. Collective over the stages, with the same jobs on each.

    Args:
        jobs: with several stages, a multiple of `Rank.micro_batch_group`.
        backward: whether to differentiate.

    Returns:
        The jobs' results on the last stage; nothing on the others.
    """
    if model.rank.pp > 1:
        return _run_stages(model, jobs, backward)
    results = []
    for job in jobs:
        with job.context():
            value, result = job.loss(job.output())
        if backward:
            value.backward()
        if result is not None:
            results.append(result)
    return results


def _run_stages(model: ShardedModel, jobs: Iterable[Job[T]], backward: bool) -> list[T]:
    every, results = list(jobs), list[T]()
    if not every:
        return results

    def forward(queue: Iterator[Job[T]], chunk: GPTModel) -> tuple[Tensor, None]:
        job = next(queue)
        with job.context():
            if not chunk.post_process:
                return model.hidden(job.ids, chunk), None
            value, result = job.loss(job.output())
            if result is not None:
                results.append(result)
            return value, None

    several = len(model.chunks) > 1
    schedule = forward_backward_pipelining_with_interleaving if several else forward_backward_pipelining_without_interleaving
    with model.device.megatron():
        schedule(
            forward_step_func=forward,
            data_iterator=[iter(every) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=len(every),
            seq_length=1,  # the stages send each other the true shapes (`variable_seq_lengths`)
            micro_batch_size=1,
            forward_only=not backward,
        )
    return results


@torch.no_grad()
def on_every_stage(model: ShardedModel, ids: Tensor, compute: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    """`compute()` of the last stage, float32 of `shape`, on all stages. Collective over them."""
    if model.rank.pp == 1:
        return compute()
    zero = torch.zeros((), device=ids.device)
    idle = Job[Tensor](ids[:1, :1], lambda: zero, lambda _: (zero, None))
    jobs = [Job(ids, compute, lambda output: (zero, output)), *[idle] * (model.rank.micro_batch_group - 1)]
    found = _run_stages(model, jobs, backward=False)
    result = torch.empty(shape, dtype=torch.float32, device=ids.device)
    if found:
        result.copy_(found[0])
    torch.distributed.broadcast(
        result, parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group()
    )
    return result
