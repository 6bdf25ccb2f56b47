"""Sequences of uneven length into padded micro-batches: pure planning, the same on every rank.

Every sequence of a step lands in exactly one micro-batch of exactly one data-parallel rank, and every trained token weighs
1 / (trained tokens of the whole step), whatever the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyreme.experience.records import GroupRecord

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

IGNORE = -100
"""A target that is not trained on, as torch's cross entropy has it."""
OVERHEAD_FLOPS = 1.2e9
"""Fixed cost of one more micro-batch (launching a few hundred small operators), as the arithmetic done in that time."""


@dataclass
class Sequences:
    """The sequences of one iteration, prompt and response together; arrays indexed [sequence][token].

    `mask`, `behaviour`, `old` and `reference` have length len(ids) - 1: entry t belongs to the prediction of ids[t + 1].
    """

    ids: list[IntArray]
    mask: list[FloatArray]
    """1 where the predicted token is trained on."""
    advantages: FloatArray
    """[sequences]."""
    behaviour: list[FloatArray]
    """Log-probability under the policy that sampled the token; 0 on the prompt."""
    old: list[FloatArray] | None = None
    """Under the policy before the iteration's first step; None: the policy itself, when there is but one step."""
    reference: list[FloatArray] | None = None
    fresh: NDArray[np.bool_] | None = None
    """[sequences]: whether every token was sampled by the policy that is trained; None: all."""
    lengths: IntArray = field(init=False)
    tokens: FloatArray = field(init=False)
    """Trained tokens of each sequence."""

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], dtype=np.int64)
        self.tokens = np.array([mask.sum() for mask in self.mask], dtype=np.float32)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class MicroBatch:
    """One padded forward pass over all tokens but each sequence's last. Padding is on the right: id 0, mask 0, log-probability 0."""

    indices: IntArray
    """Which sequences, [b]."""
    ids: Tensor
    """int64 [b, w]: what the model reads."""
    targets: Tensor
    """int64 [b, w]: the token that follows, or IGNORE where it is not trained on."""
    mask: Tensor
    """float32 [b, w]: 1 where `targets` is a token."""
    advantages: Tensor
    """float32 [b, 1]."""
    behaviour: Tensor
    """float32 [b, w]."""
    fresh: Tensor
    """float32 [b, 1]: 1 where the policy that is trained sampled every token."""
    old: Tensor | None
    reference: Tensor | None


def collect(groups: Sequence[GroupRecord], advantages: FloatArray, version: int) -> Sequences:
    """The samples of `groups`, in order, each as prompt + response.

    Args:
        advantages: float32 [groups, samples].
        version: of the policy that will be trained.
    """
    ids, mask, behaviour = [], [], []
    for group in groups:
        prompt = group.prompt_ids.astype(np.int64)
        blank = np.zeros(len(prompt) - 1, dtype=np.float32)
        for sample in group.samples:
            ids.append(np.concatenate([prompt, sample.token_ids.astype(np.int64)]))
            mask.append(np.concatenate([blank, sample.loss_mask.astype(np.float32)]))
            behaviour.append(np.concatenate([blank, sample.logprobs]))
    fresh = [all(span[0] == version for span in sample.spans) for group in groups for sample in group.samples]
    return Sequences(ids, mask, advantages.reshape(-1), behaviour, fresh=np.array(fresh))


def freshly_sampled(sequences: Sequences) -> IntArray:
    """Indices of the sequences that tell how far replica and learner are apart: the same policy should have said the same."""
    return np.flatnonzero(_fresh(sequences))


def _fresh(sequences: Sequences) -> NDArray[np.bool_]:
    return np.ones(len(sequences), dtype=bool) if sequences.fresh is None else sequences.fresh


def with_gradient(sequences: Sequences, kl_coef: float) -> IntArray:
    """Indices of the sequences that move the policy.

    A zero advantage makes a sequence's surrogate and its gradient exactly zero, so without a KL term it may be left out; the
    loss stays exact because its denominator counts every trained token of the batch.
    """
    if kl_coef > 0:
        return np.flatnonzero(sequences.tokens > 0)
    return np.flatnonzero((sequences.advantages != 0) & (sequences.tokens > 0))


def split_steps(groups: int, samples: int, steps: int, epochs: int, seed: Sequence[int]) -> list[IntArray]:
    """Which sequences each optimizer step of an iteration takes: whole groups, every sequence once per epoch.

    With one step the order is the log's; with several the groups are dealt in an order drawn from (seed, epoch).
    """
    if steps == 1:
        return [np.arange(groups * samples, dtype=np.int64) for _ in range(epochs)]
    result = []
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(groups)
        for part in np.array_split(order, steps):
            result.append((np.sort(part)[:, None] * samples + np.arange(samples)).reshape(-1))
    return [part for part in result if len(part)]


def share(lengths: IntArray, indices: IntArray, rank: int, ranks: int) -> IntArray:
    """The part of `indices` that data-parallel rank `rank` of `ranks` works on: long and short dealt out evenly.

    Back and forth (0 1 .. n-1 n-1 .. 1 0) over the sequences by falling length, so that no rank always gets the longer one.
    """
    order = indices[np.argsort(-lengths[indices], kind="stable")]
    place = np.arange(len(order)) % (2 * ranks)
    mine: IntArray = order[np.minimum(place, 2 * ranks - 1 - place) == rank]
    return mine


def plan_micro_batches(lengths: IntArray, indices: IntArray, budget: int, overhead: float) -> list[IntArray]:
    """Cuts `indices`, by falling length, into micro-batches of least total cost.

    The cost of a micro-batch is its padded tokens (rows x longest) plus `overhead`; its padded tokens stay within `budget`
    unless it is one single sequence. An exact dynamic programme over the cuts: O(n) numpy operations of at most n elements.

    Returns:
        Index arrays that together hold every index once, longest sequences first (so that memory peaks at the start).
    """
    order = indices[np.argsort(-lengths[indices], kind="stable")]
    size = lengths[order].astype(np.float64)
    count = len(order)
    best = np.zeros(count + 1)  # best[k]: least cost of the first k sequences
    cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        starts = np.arange(max(0, end - max(1, budget)), end)  # a row holds at least one token
        padded = size[starts] * (end - starts)
        cost = np.where((padded <= budget) | (starts == end - 1), best[starts] + padded + overhead, np.inf)
        choice = int(cost.argmin())
        best[end], cut[end] = cost[choice], starts[choice]
    batches = []
    end = count
    while end > 0:
        batches.append(order[cut[end] : end])
        end = int(cut[end])
    return batches[::-1]


def pad(sequences: Sequences, indices: IntArray, device: torch.device) -> MicroBatch:
    """The micro-batch of these sequences as tensors on `device`."""
    shape = (len(indices), int(sequences.lengths[indices].max()) - 1)

    def matrix(arrays: list[FloatArray]) -> Tensor:
        out = np.zeros(shape, dtype=np.float32)
        for row, index in enumerate(indices):
            out[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(out).to(device)

    ids, following = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, index in enumerate(indices):
        sequence = sequences.ids[index]
        ids[row, : len(sequence) - 1], following[row, : len(sequence) - 1] = sequence[:-1], sequence[1:]
    mask = matrix(sequences.mask)
    return MicroBatch(
        indices=indices,
        ids=torch.from_numpy(ids).to(device),
        targets=torch.from_numpy(following).to(device).masked_fill_(mask == 0, IGNORE),
        mask=mask,
        advantages=torch.from_numpy(sequences.advantages[indices][:, None]).to(device),
        behaviour=matrix(sequences.behaviour),
        fresh=torch.from_numpy(_fresh(sequences)[indices][:, None].astype(np.float32)).to(device),
        old=None if sequences.old is None else matrix(sequences.old),
        reference=None if sequences.reference is None else matrix(sequences.reference),
    )
