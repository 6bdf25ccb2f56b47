"""Plans the padded blocks in which attention runs where no kernel takes packed sequences: on CPU, and in float32.

A block has pieces: consecutive queries of a sequence, which attend to their own keys causally and to keys before them. A sequence
is one piece; with a window it is cut, and a piece has as many queries as the window. So work and memory grow with the window and
not with the square of the length.

Invariant: the plan depends only on the sequences' lengths and the width of the queries, so every rank and the memory estimate get
the same plan. This module imports no torch.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

CALL_FLOPS = 1e7
"""Fixed cost of one call of an attention kernel, forwards and backwards, in floating-point operations of the same duration on
CPU. It affects only speed: on a faster device there are more calls than optimal."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of all sequences, in their order: int64 [n] each.

    Attributes:
        sequence: the number of the sequence.
        lengths: the number of queries.
        keys: the key of the first query, among all keys. That of each further query follows.
        before: the number of keys before it that some query sees.
    """

    sequence: IntArray
    lengths: IntArray
    keys: IntArray
    before: IntArray


def cut_pieces(lengths: IntArray, key_lengths: IntArray, window: int | None) -> Pieces:
    """The pieces of sequences with these numbers of queries and keys. The queries belong to the last keys."""
    earlier, first = key_lengths - lengths, np.cumsum(key_lengths) - lengths
    if window is None:
        return Pieces(np.arange(len(lengths)), lengths, first, earlier)
    counts = -(-lengths // window)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    offset = window * (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts))
    own = np.minimum(lengths[sequence] - offset, window)
    return Pieces(sequence, own, first[sequence] + offset, np.minimum(earlier[sequence] + offset, window - 1))


def plan_pieces(pieces: Pieces, features: int, window: int | None, runs: tuple[int, ...] = ()) -> list[IntArray]:
    """The indices of each block's pieces. Those of a block all have keys before them or none; with a window, equally many.

    Args:
        runs: the number of sequences of each run, which is planned alone. Empty: all are one run.
    """
    ends = np.searchsorted(pieces.sequence, np.cumsum((0, *runs))) if runs else np.array([0, len(pieces.lengths)])
    kind = pieces.before > 0 if window is None else pieces.before
    plan = []
    for start, end in pairwise(ends.tolist()):
        for each in np.unique(kind[start:end]).tolist():
            chosen = start + np.flatnonzero(kind[start:end] == each)
            plan += [chosen[block] for block in plan_blocks((pieces.lengths + pieces.before)[chosen], features)]
    return plan


def plan_blocks(lengths: IntArray, features: int) -> list[IntArray]:
    """Splits sequences into blocks of least cost, longest first: the indices of each block's sequences.

    A block of n sequences, padded to the width w, costs 7 n w^2 floating-point operations for each feature of the queries,
    forwards and backwards, because a causal mask leaves half of the scores, and in addition CALL_FLOPS. The minimum is exact: a
    dynamic programme over the cuts between different lengths.
    """
    different, counts = np.unique(lengths, return_counts=True)
    widths, before = different[::-1].astype(np.float64), np.concatenate([[0], np.cumsum(counts[::-1])])
    best, cut = np.zeros(len(widths) + 1), np.zeros(len(widths) + 1, dtype=np.int64)
    for end in range(1, len(widths) + 1):
        cost = best[:end] + (before[end] - before[:end]) * widths[:end] ** 2 * 7 * features + CALL_FLOPS
        cut[end] = cost.argmin()
        best[end] = cost[cut[end]]
    order = np.argsort(-lengths, kind="stable")
    blocks, end = [], len(widths)
    while end > 0:
        blocks.append(order[before[cut[end]] : before[end]])
        end = int(cut[end])
    return blocks[::-1]


def spread_positions(tokens: int, longest: int, features: int) -> tuple[int, int]:
    """The positions and tokens of all blocks of sequences of evenly spread lengths 1 to `longest` and about `tokens` tokens."""
    count = max(1, round(2 * tokens / (longest + 1)))
    lengths = np.linspace(longest, 1, count).round().astype(np.int64)
    blocks = [lengths[part] for part in plan_blocks(lengths, features)]
    return sum(len(block) * int(block.max()) for block in blocks), int(lengths.sum())
