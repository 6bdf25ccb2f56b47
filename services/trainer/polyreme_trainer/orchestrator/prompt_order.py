"""The prompt of each group index, and the seed of each sampler, as pure functions of the run's seed.

Invariant: nothing here depends on time, on earlier calls or on a library's random generator, so that a takeover, a resume or a newer
numpy gives the same prompts and seeds.
"""

import struct
from functools import lru_cache

import numpy as np
import xxhash

_U64 = (1 << 64) - 1


def row_of(seed: int, index: int, size: int) -> int:
    """The dataset row of group `index`: pass index // size, position index % size in that pass's shuffled order."""
    return int(pass_order(seed, index // size, size)[index % size])


@lru_cache(maxsize=2)
def pass_order(seed: int, number: int, size: int) -> np.ndarray:
    """The shuffled rows of pass `number`, int64 [size]: rows sorted by a 64-bit mix of (seed, pass, row)."""
    key = np.uint64(_digest(seed, number))
    with np.errstate(over="ignore"):
        order = np.argsort(_splitmix64(np.arange(size, dtype=np.uint64) + key), kind="stable")
    order.flags.writeable = False
    return order


def sequence_seed(seed: int, group: int, attempt: int, sample: int, prefix_length: int) -> int:
    """A sampler's seed, 63 bits because engines use a signed word. A continued sample has a seed of its own."""
    return _digest(seed, group, attempt, sample, prefix_length) >> 1


def retry_draw(seed: int, group: int) -> float:
    """A number in [0, 1) that decides whether a group whose prompt could be skipped is sampled nevertheless."""
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
