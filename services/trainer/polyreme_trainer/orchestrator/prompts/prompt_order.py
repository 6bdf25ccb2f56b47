"""The prompt of each group index, and the seed of each sampler, as pure functions of the run's seed.

Invariant: nothing here depends on time, on earlier calls or on a library's random generator, so that a takeover, a resume or a
newer numpy gives the same prompts and seeds.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import xxhash

_U64 = (1 << 64) - 1


class PromptOrder:
    """The assignment of prompts to groups.

    A pass has as many places as there are prompts. Without weights it has each prompt once. With weights a source gets its share
    of the places of every pass, and iterates over its own prompts in separate passes, so all are used even with a small share.

    Args:
        seed: seed of the order.
        sizes: number of prompts of each source. Rows are numbered consecutively over all sources.
        weights: share of each source; None: as many places as it has prompts.
        shuffled: whether each pass has its own order. False: the order of the rows.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float] | None = None, *, shuffled: bool = True) -> None:
        self._seed, self._shuffled = seed, shuffled
        self._sizes = tuple(sizes) if weights is not None else (sum(sizes),)
        self._places = self._sizes if weights is None else _shares(sum(sizes), weights)
        self._ends = list(accumulate(self._places))
        self._starts = [0, *accumulate(self._sizes)]
        passes = 2 * (1 + len(self._sizes))  # of the run and of each source: the current one and its neighbour
        self._pass_order = lru_cache(maxsize=passes)(pass_order)

    def row_of(self, index: int) -> int:
        """The row of group `index`."""
        if len(self._places) == 1:
            return self._row(self._seed, index, self._sizes[0])
        number = index // self._ends[-1]
        place = self._row(self._seed, index, self._ends[-1])
        source = bisect_right(self._ends, place)
        draw = number * self._places[source] + place - (self._ends[source] - self._places[source])
        return self._starts[source] + self._row(_digest(self._seed, source), draw, self._sizes[source])

    def _row(self, seed: int, index: int, size: int) -> int:
        return int(self._pass_order(seed, index // size, size)[index % size]) if self._shuffled else index % size


def _shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides `total` places by weight with the largest-remainder method. Each source gets at least one."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return tuple(max(1, count) for count in counts)


def pass_order(seed: int, number: int, size: int) -> np.ndarray:
    """The shuffled rows of pass `number`, int64 [size]: rows sorted by a 64-bit mix of (seed, pass, row)."""
    key = np.uint64(_digest(seed, number))
    with np.errstate(over="ignore"):
        order = np.argsort(_splitmix64(np.arange(size, dtype=np.uint64) + key), kind="stable")
    order.flags.writeable = False
    return order


def sequence_seed(seed: int, group: int, attempt: int, sample: int, prefix_length: int) -> int:
    """A sampler's seed, 63 bits because engines use a signed word. A continued sample has a different seed."""
    return _digest(seed, group, attempt, sample, prefix_length) >> 1


def retry_draw(seed: int, group: int) -> float:
    """A number in [0, 1) that decides whether a group is sampled although its prompt could be skipped."""
    return _digest(seed, group) / 2.0**64


def _digest(*values: int) -> int:
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(values)}Q", *(value & _U64 for value in values))))


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of uint64, so rows never tie."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
