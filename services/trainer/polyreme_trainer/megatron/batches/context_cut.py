"""Distributes the tokens of a micro-batch over context ranks.

For c ranks a sequence is cut into 2 c pieces. Rank r has the pieces r and 2 c - 1 - r: an early one that attends to few tokens,
and a late one that attends to many, so all ranks have the same amount of computation (Grattafiori et al. 2024, section 3.3.2).

Invariant: every token is on exactly one rank, and all ranks have the same number of tokens. The module is pure.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Half:
    """The early or the late pieces of all sequences on one rank, without empty ones.

    Attributes:
        lengths: the number of tokens of each piece.
        key_lengths: the number of tokens of its sequence up to the end of the piece.
        keys: int64 [sum of key_lengths], the positions of these tokens among the gathered tokens.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    keys: Tensor


@dataclass(frozen=True)
class Cut:
    """One rank's tokens of a micro-batch of t tokens.

    Attributes:
        tokens: int64 [t / ranks], the indices of these tokens: those of the first half, then those of the second.
        places: int64 [t], the position of each token among the gathered tokens: the first rank's tokens, then the second's, ...
        halves: the early and the late half; a half without tokens is omitted.
    """

    tokens: Tensor
    places: Tensor
    halves: tuple[Half, ...]


def piece_ends(lengths: IntArray, ranks: int) -> IntArray:
    """The number of tokens before each of the 2 c pieces of each sequence, then its total: int64 [2 c + 1, sequences].

    Pieces of a sequence differ by at most one token. The tokens that do not divide go to the ranks in turn, from sequence to
    sequence. So two ranks' totals differ by at most one token too, and are equal when `ranks` divides the number of all tokens.
    """
    each, rest = np.divmod(lengths, 2 * ranks)
    turn, number = np.cumsum(rest) - rest, np.arange(ranks)[:, None]
    more = (turn + rest - number + ranks - 1) // ranks - (turn - number + ranks - 1) // ranks  # turns of each rank: 0, 1 or 2
    sizes = np.concatenate([each + (more > 0), (each + (more > 1))[::-1]])
    return np.concatenate([np.zeros((1, len(lengths)), dtype=np.int64), np.cumsum(sizes, axis=0)])


def runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """`start, start + 1, ...` of each length, one run after the other."""
    result: IntArray = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    return result


@lru_cache(maxsize=8)
def cut_sequences(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> Cut:
    """The tokens of `rank`. The number of all tokens must be a multiple of `ranks`. The result is cached; do not change it."""
    counts = np.array(lengths, dtype=np.int64)
    starts, ends = np.cumsum(counts) - counts, piece_ends(counts, ranks)
    pieces = [(number, 2 * ranks - 1 - number) for number in range(ranks)]
    tokens = [np.concatenate([runs(starts + ends[piece], ends[piece + 1] - ends[piece]) for piece in both]) for both in pieces]
    places = np.empty(counts.sum(), dtype=np.int64)
    places[np.concatenate(tokens)] = np.arange(len(places))
    halves = []
    for piece in pieces[rank]:
        there = ends[piece + 1] > ends[piece]
        if there.any():
            seen = ends[piece + 1][there]
            keys = torch.from_numpy(places[runs(starts[there], seen)]).to(device)
            halves.append(Half(tuple((seen - ends[piece][there]).tolist()), tuple(seen.tolist()), keys))
    return Cut(torch.from_numpy(tokens[rank]).to(device), torch.from_numpy(places).to(device), tuple(halves))
