"""Supervised training on the learner's ranks, before the first iteration: cross entropy of responses, phase by phase.

Which rows a step takes and its learning rate are functions of (seed, phase, step), so the warm start of a seed is always the same.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.config.trainer import SftPhase
from polyreme_trainer.data.prompts import load_examples
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.leader import join, split
from polyreme_trainer.megatron.batch import IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.optimizer import Optimizer
from polyreme_trainer.megatron.policy import Policy
from polyreme_trainer.megatron.step import Layout, optimize

FLOOR = 0.02
"""Where the cooldown ends, as a part of the phase's rate."""
REPORT_EVERY = 10


def learning_rate(phase: SftPhase, step: int) -> float:
    """The rate of step 0, 1, ...: linear warm-up, constant, linear cooldown to `FLOOR` of it."""
    factor = 1.0
    if phase.warmup:
        factor = min(factor, (step + 1) / phase.warmup)
    if phase.cooldown:
        factor = min(factor, max(FLOOR, (phase.steps - step) / phase.cooldown))
    return phase.lr * factor


def batches(rows: int, phase: SftPhase, seed: Sequence[int]) -> Iterator[IntArray]:
    """Row numbers of each step, int64 [batch_size]: pass after pass over all rows, each in an order drawn from (seed, pass)."""
    waiting = np.empty(0, dtype=np.int64)
    number = 0
    for _ in range(phase.steps):
        while len(waiting) < phase.batch_size:
            waiting = np.concatenate([waiting, np.random.default_rng([*seed, number]).permutation(rows)])
            number += 1
        yield waiting[: phase.batch_size]
        waiting = waiting[phase.batch_size :]


async def packed_examples(phase: SftPhase, config: RunConfig, files: Mapping[str, bytes]) -> bytes:
    """The phase's rows, tokenised, as bytes for `unpack`. Raises DataError."""
    template = Template(files, config.data)
    examples = await asyncio.to_thread(load_examples, phase.data, config.data, template, config.rollout.max_model_len)
    return join(
        [
            np.array([len(example.ids) for example in examples], dtype=np.int64).tobytes(),
            np.concatenate([example.ids for example in examples]).tobytes(),
            np.concatenate([example.loss_mask for example in examples]).tobytes(),
        ]
    )


def unpack(packed: bytes) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """ids, int32 [length] each, and loss masks, uint8 [length] each, of every row."""
    lengths, ids, mask = split(packed)
    ends = np.cumsum(np.frombuffer(lengths, np.int64))[:-1]
    return np.split(np.frombuffer(ids, np.int32), ends), np.split(np.frombuffer(mask, np.uint8), ends)


def select(ids: Sequence[np.ndarray], loss_mask: Sequence[np.ndarray], rows: IntArray) -> Sequences:
    """The rows as sequences to train on. ids: int32 [length] each; loss_mask: uint8 [length], 1 on the response."""
    chosen = [ids[row].astype(np.int64) for row in rows]
    blank = [np.zeros(len(x) - 1, dtype=np.float32) for x in chosen]
    mask = [loss_mask[row][1:].astype(np.float32) for row in rows]
    return Sequences(chosen, mask, np.zeros(len(rows), dtype=np.float32), behaviour=blank)


def run_phase(
    policy: Policy,
    optimizer: Optimizer,
    layout: Layout,
    phase: SftPhase,
    ids: Sequence[np.ndarray],
    loss_mask: Sequence[np.ndarray],
    seed: Sequence[int],
    report: Callable[[dict[str, float]], None],
) -> None:
    """One phase: `phase.steps` optimizer steps, each the token mean of the cross entropy of its rows' responses.

    Args:
        ids, loss_mask: the phase's data, as `select` takes it.
        report: gets step, loss, lr and tokens_per_second (padding left out) every few steps and after the last; on every rank.
    """
    tokens_seen, since = 0, time.perf_counter()
    for step, rows in enumerate(batches(len(ids), phase, seed)):
        sequences = select(ids, loss_mask, rows)
        count = float(sequences.tokens.sum())
        loss_sum = torch.zeros(1, dtype=torch.float64, device=layout.device)

        def loss(batch: MicroBatch, logprobs: Tensor, count: float = count, loss_sum: Tensor = loss_sum) -> Tensor:
            value = -(logprobs * batch.mask).sum() / count
            loss_sum.add_(value.detach())
            return value

        lr = learning_rate(phase, step)
        optimize(policy, optimizer, layout, sequences, np.arange(len(rows)), loss, temperature=1.0, lr=lr)
        tokens_seen += int(sequences.lengths.sum())
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == phase.steps:
            layout.sum_over_data(loss_sum)
            now = time.perf_counter()
            report({"step": step + 1, "loss": loss_sum.item(), "lr": lr, "tokens_per_second": tokens_seen / (now - since)})
            tokens_seen, since = 0, now
