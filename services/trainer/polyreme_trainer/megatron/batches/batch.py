"""Plans micro-batches of packed sequences of uneven length. The planning is pure and the same on every rank.

Invariant: every sequence of a step is in exactly one micro-batch of exactly one data-parallel rank, and is never split. A loss
gets the trained tokens of a micro-batch as flat arrays.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyreme_trainer.algorithms.batch import sequence_of
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.huggingface.families.base import Architecture

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Routes = NDArray[np.integer[Any]]

IGNORE = -100
"""The target of positions that are not trained on, as in torch's cross entropy."""


@dataclass(frozen=True)
class Cost:
    """The cost of training a sequence. The unit is one token's cost in all matrix products with weights, forwards and backwards.

    Attributes:
        attention: its cost per pair of positions of a sequence. Measured on CPU in float32, it is 1.06 times that of `cost_of`.
    """

    attention: float = 0.0

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """The cost of a sequence of each length."""
        return lengths * (1.0 + self.attention * lengths)


def cost_of(arch: Architecture) -> Cost:
    """The cost that follows from a model's floating-point operations (Narayanan et al. 2021, without their recomputation).

    A token takes 6 for each weight that it uses. A sequence of L tokens takes 6 L^2 for each feature of the queries in each
    layer, because a causal mask leaves half of the scores. Layers with a window are not counted: their cost grows with L.
    """
    weights = arch.active_parameters
    return Cost((arch.layers - sum(arch.sliding)) * arch.queries / weights)


@dataclass(frozen=True)
class Sequences:
    """n sequences of token ids, each a prompt with its response, and the mask of the trained tokens.

    A sequence of L tokens has L - 1 predictions; prediction k is of token k + 1. Per-token arrays have one entry per prediction,
    t in all; the entries of sequence i are at `offsets[i]:offsets[i + 1]`.

    Attributes:
        ids: int64 [L] each, L >= 1.
        mask: float32 [t], 1 where the predicted token is trained on.
        together: the number of consecutive sequences, counted from the first, that stay in one micro-batch.
        routes: for each sequence, the experts that sampled its last tokens, integers [tokens, layers, top_k]: those of the
            forward pass that predicted each; -1: unknown. None: all unknown.
    """

    ids: Sequence[IntArray]
    mask: FloatArray
    together: int = 1
    routes: Sequence[Routes] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> IntArray:
        """int64 [n], the number of tokens of each sequence."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)

    @cached_property
    def offsets(self) -> IntArray:
        """int64 [n + 1], the start of each sequence's predictions."""
        return np.concatenate([[0], np.cumsum(self.lengths - 1)]).astype(np.int64)

    @cached_property
    def trained(self) -> IntArray:
        """int64 [n], the number of trained tokens of each sequence."""
        counts = np.bincount(sequence_of(self.offsets), weights=self.mask, minlength=len(self))
        return counts.astype(np.int64)

    def take(self, indices: IntArray) -> "Sequences":
        """The sequences `indices`, in this order; a sequence may occur several times."""
        parts = [self.mask[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        routes = None if self.routes is None else [self.routes[i] for i in indices]
        return Sequences([self.ids[i] for i in indices], np.concatenate(parts), routes=routes)


def with_end(sequences: Sequences) -> Sequences:
    """Each sequence with one arbitrary token appended, the only trained one. Its prediction follows all real tokens."""
    ids = [np.append(each, each[-1]) for each in sequences.ids]
    extended = Sequences(ids, np.zeros(sum(len(each) - 1 for each in ids), dtype=np.float32), sequences.together)
    extended.mask[extended.offsets[1:] - 1] = 1
    return extended


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass over the t tokens of packed sequences, all except each sequence's last, see `pack`. Padding is at the end,
    with target IGNORE.

    Attributes:
        indices: int64 [b], indices of the sequences.
        ids: t, the model's inputs.
        targets: int64 [t], the next token, or IGNORE where it is not trained on.
        real: bool [t], False where `ids` is padding.
        tokens: int64 [k], the trained tokens' positions among the iteration's predictions, in the order of `targets`.
        sequence: int64 [k], the number of each trained token's sequence among `indices`.
        padding: the number of positions of `ids` that are padding, because there are no tokens or by alignment.
        routes: int64 [t, layers, top_k], the experts that the replica chose at each position; -1 where unknown. None: everywhere.
        runs: the number of trained tokens of each run of sequences, see `pack`; empty without runs.
    """

    indices: IntArray
    ids: PackedIds
    targets: Tensor
    real: Tensor
    tokens: IntArray
    sequence: Tensor
    padding: int
    routes: Tensor | None = None
    runs: tuple[int, ...] = ()

    def take(self, values: NDArray[np.generic]) -> Tensor:
        """The [k] entries of a per-token array [t] for the micro-batch's trained tokens, on its device."""
        return torch.from_numpy(values[self.tokens]).to(self.targets.device)


def supervised(ids: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.uint8]], together: int = 1) -> Sequences:
    """Supervised rows as sequences. `ids` is int32 [length] each; `loss_mask` is uint8 [length] each, 1 for trained tokens."""
    mask = np.concatenate([x[1:] for x in loss_mask]).astype(np.float32)
    return Sequences([x.astype(np.int64) for x in ids], mask, together)


def split_steps(group: IntArray, steps: int, epochs: int, seed: Sequence[int]) -> list[IntArray]:
    """The sequences of each optimizer step of an iteration. Groups are never split, and every sequence occurs once per epoch.

    With one step the order is the log's; with several steps the groups' order is drawn from (seed, epoch).

    Args:
        group: int64 [n], the group of each sequence, 0, 0, ... 1, 1, ...
    """
    if steps == 1:
        return [np.arange(len(group), dtype=np.int64) for _ in range(epochs)]
    members = [np.flatnonzero(group == number) for number in range(int(group.max()) + 1)]
    result = []
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(members))
        for part in np.array_split(order, steps):
            if len(part):
                result.append(np.concatenate([members[number] for number in np.sort(part)]))
    return result


def share(costs: NDArray[np.float64], indices: IntArray, ranks: int) -> list[IntArray]:
    """Each data-parallel rank's share of `indices`: the costliest sequence left goes to the rank with least cost (Graham 1969).

    Two ranks' totals differ by at most the costliest sequence. Of equal ranks the first is taken, so all get the same result.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap of costs and ranks
    for index in indices[np.argsort(-costs[indices], kind="stable")].tolist():
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + float(costs[index]), rank))
    return [np.array(each, dtype=np.int64) for each in shares]


def plan_ranks(
    tokens: IntArray, costs: NDArray[np.float64], indices: IntArray, ranks: int, budget: int, group: int = 1
) -> list[list[IntArray]]:
    """The micro-batches of every data-parallel rank, as many on each, because ranks may exchange tensors within a micro-batch.

    A rank that plans fewer splits its largest micro-batch in two. A rank with fewer sequences than micro-batches gets empty ones.

    Args:
        tokens, costs: the tokens and the cost of each sequence.
        group: the number of a rank's micro-batches is a multiple of this.
    """
    plans = [plan_micro_batches(tokens, mine, budget) for mine in share(costs, indices, ranks)]
    count = -(-max(map(len, plans)) // group) * group
    for plan in plans:
        while len(plan) < count:
            sizes = [int(tokens[part].sum()) if len(part) > 1 else 0 for part in plan]
            if not any(sizes):
                plan.append(np.array([], dtype=np.int64))
                continue
            largest = int(np.argmax(sizes))
            plan[largest : largest + 1] = np.array_split(plan[largest], 2)
    return plans


def plan_micro_batches(tokens: IntArray, indices: IntArray, budget: int) -> list[IntArray]:
    """Cuts `indices`, in order of decreasing length, into the least number of micro-batches of at most `budget` tokens.

    Of such cuts it takes the one whose largest micro-batch is smallest, so that memory and a pipeline's stages are used evenly. A
    sequence of more than `budget` tokens forms its own micro-batch.

    Returns:
        Index arrays that together contain every index once, longest sequences first: attention pads similar lengths together.
    """
    order = indices[np.argsort(-tokens[indices], kind="stable")]
    before = np.concatenate([[0], np.cumsum(tokens[order])])
    count = len(_cuts(before, budget))
    low, high = 1, budget  # the largest micro-batch
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cuts(before, middle)) == count else (middle + 1, high)
    return np.split(order, _cuts(before, high)[1:]) if len(order) else []


def _cuts(before: IntArray, budget: int) -> list[int]:
    """The first sequence of each micro-batch when each takes as many as fit. before: tokens before each, then the total."""
    starts, start = [], 0
    while start < len(before) - 1:
        starts.append(start)
        start = max(start + 1, int(np.searchsorted(before, before[start] + budget, side="right")) - 1)
    return starts


def pack(
    sequences: Sequences,
    indices: IntArray,
    device: torch.device,
    multiple: int = 1,
    joins_beginnings: bool = False,
    runs: Sequence[int] = (),
) -> MicroBatch:
    """The micro-batch of these sequences on `device`. Without a sequence it is one position of padding.

    Args:
        multiple: the number of positions is a multiple of this.
        joins_beginnings: whether the tokens before a sequence's first trained prediction are there once for all sequences that
            begin with them, see `PackedIds.places`.
        runs: the number of sequences of each run that has adapters of its own. Empty: there is one run.
    """
    predictions = sequences.lengths[indices] - 1
    starts, row = sequences.offsets[indices], np.repeat(np.arange(len(indices)), predictions)
    tokens = starts[row] + np.arange(len(row)) - np.repeat(np.cumsum(predictions) - predictions, predictions)
    trained = sequences.mask[tokens] > 0
    inputs, count = PackedIds(torch.zeros(multiple, dtype=torch.int64, device=device), (multiple,)), 0
    targets = np.empty(0, dtype=np.int64)
    if len(row):
        ids = np.concatenate([sequences.ids[index][:-1] for index in indices])
        following = np.concatenate([sequences.ids[index][1:] for index in indices])
        targets, places = np.where(trained, following, IGNORE), None
        if joins_beginnings:
            places, kept = share_prefixes(ids, trained, predictions)
            ids, targets = ids[kept], targets[kept]
        count = len(ids)
        filled, lengths = predictions > 0, tuple(predictions[predictions > 0].tolist())
        of_runs = _count_runs(runs, np.flatnonzero(filled))
        inputs = PackedIds(torch.from_numpy(ids).to(device), lengths, places, of_runs).aligned(multiple)
    targets = np.pad(targets, (0, len(inputs.ids) - count), constant_values=IGNORE)
    return MicroBatch(
        indices=indices,
        ids=inputs,
        targets=torch.from_numpy(targets).to(device),
        real=torch.arange(len(targets), device=device) < count,
        tokens=tokens[trained],
        sequence=torch.from_numpy(row[trained]).to(device),
        padding=len(targets) - count,
        routes=None if sequences.routes is None else _pack_routes(sequences, indices, len(targets)).to(device),
        runs=_count_runs(runs, row[trained]),
    )


def _count_runs(runs: Sequence[int], sequences: IntArray) -> tuple[int, ...]:
    """How often each run has its sequences among `sequences`; empty without runs. `runs`: the number of sequences of each."""
    if not runs:
        return ()
    return tuple(np.bincount(np.repeat(np.arange(len(runs)), runs)[sequences], minlength=len(runs)).tolist())


def share_prefixes(ids: IntArray, trained: NDArray[np.bool_], lengths: IntArray) -> tuple[IntArray | None, NDArray[np.bool_]]:
    """Finds sequences with equal tokens before their first trained one.

    Args:
        ids: int64 [p], the tokens of all sequences.
        trained: bool [p], where a prediction is trained on.
        lengths: the number of tokens of each sequence.

    Returns:
        `PackedIds.places`, and which of the tokens stay, bool [p]: all, except the beginnings that an earlier sequence has too.
    """
    places, kept = np.arange(len(ids)), np.ones(len(ids), dtype=np.bool_)
    ends = np.cumsum(lengths)
    trained_places = np.append(np.flatnonzero(trained), len(ids))
    firsts = np.minimum(trained_places[np.searchsorted(trained_places, ends - lengths)], ends)
    known: dict[bytes, int] = {}
    for start, first in zip((ends - lengths).tolist(), firsts.tolist(), strict=True):
        earlier = known.setdefault(ids[start:first].tobytes(), start)
        if earlier < start:
            places[start:first] = np.arange(earlier, earlier + first - start)
            kept[start:first] = False
    if kept.all():
        return None, kept
    return (np.cumsum(kept) - 1)[places], kept


def _pack_routes(sequences: Sequences, indices: IntArray, positions: int) -> Tensor:
    """The routes of these sequences at their places in a micro-batch."""
    assert sequences.routes is not None
    packed = np.full((positions, *sequences.routes[0].shape[1:]), -1, dtype=np.int64)
    ends = np.cumsum(sequences.lengths[indices] - 1)
    for index, end in zip(indices, ends, strict=True):
        routes = sequences.routes[index]
        packed[end - len(routes) : end] = routes
    return torch.from_numpy(packed)
