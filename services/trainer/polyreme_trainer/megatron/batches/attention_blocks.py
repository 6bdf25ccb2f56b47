"""Plans the padded blocks in which attention runs where no kernel takes packed sequences: on CPU, and in float32.

Invariant: the plan depends only on the sequences' lengths and the width of the queries, so every rank and the memory estimate get the same
plan. This module imports no torch.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

CALL_FLOPS = 1e7
"""Fixed cost of one call of an attention kernel, forwards and backwards, in floating-point operations of the same duration on CPU. It
affects only speed: on a faster device there are more calls than optimal."""


def plan_blocks(lengths: IntArray, features: int) -> list[IntArray]:
    """Splits sequences into blocks of least cost, longest first: the indices of each block's sequences.

    A block of n sequences, padded to the width w, costs 7 n w^2 floating-point operations for each feature of the queries, forwards and
    backwards, because a causal mask leaves half of the scores, and in addition CALL_FLOPS. The minimum is exact: a dynamic programme over the cuts
    between different lengths.
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
    """The positions of all blocks, and the tokens in them, of sequences with evenly spread lengths from 1 to `longest` and about `tokens` tokens."""
    count = max(1, round(2 * tokens / (longest + 1)))
    lengths = np.linspace(longest, 1, count).round().astype(np.int64)
    blocks = [lengths[part] for part in plan_blocks(lengths, features)]
    return sum(len(block) * int(block.max()) for block in blocks), int(lengths.sum())
