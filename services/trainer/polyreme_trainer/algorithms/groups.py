"""Statistics of groups of samples, and the tolerance within which scores are equal.

Invariant: only this module decides whether a group has variance, for advantages and for filters.
"""

import numpy as np
from numpy.typing import NDArray

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Scores are equal when they differ by at most RELATIVE times the largest magnitude plus ABSOLUTE. A smaller one is rounding:
float32 resolves 1.2e-7, and sums of weighted parts cancel to about 1e-16. Dividing by it would produce full-size advantages."""

Float64 = NDArray[np.float64]


class Groups:
    """The samples of a batch by group.

    Args:
        group: int64 [n], equal for the samples of one prompt; in any order.
    """

    def __init__(self, group: NDArray[np.int64]) -> None:
        _, self.member_of, self.sizes = np.unique(group, return_inverse=True, return_counts=True)

    def __len__(self) -> int:
        return len(self.sizes)

    def sums(self, values: Float64) -> Float64:
        """float64 [groups], the sums of `values` [n] over each group."""
        return np.bincount(self.member_of, weights=values, minlength=len(self)).astype(np.float64, copy=False)

    def mean(self, values: Float64) -> Float64:
        """float64 [n], for each sample the mean of `values` [n] over its group."""
        means: Float64 = (self.sums(values) / self.sizes)[self.member_of]
        return means

    def std(self, values: Float64, ddof: int) -> Float64:
        """float64 [n], for each sample the standard deviation of its group, with size - ddof as divisor."""
        squares = self.sums((values - self.mean(values)) ** 2)
        result: Float64 = np.sqrt(squares / (self.sizes - ddof))[self.member_of]
        return result

    def constant(self, values: Float64) -> NDArray[np.bool_]:
        """bool [n], whether all samples of the sample's group have equal values, up to rounding."""
        low, high = np.full(len(self), np.inf), np.full(len(self), -np.inf)
        np.minimum.at(low, self.member_of, values)
        np.maximum.at(high, self.member_of, values)
        result: NDArray[np.bool_] = equal(low, high)[self.member_of]
        return result


def equal(low: Float64, high: Float64) -> NDArray[np.bool_]:
    """Whether the ends of a range are equal up to rounding."""
    result: NDArray[np.bool_] = high - low <= RELATIVE * np.maximum(np.abs(low), np.abs(high)) + ABSOLUTE
    return result
