"""Chooses the next batch of texts.

Invariant: pure; every batch contains the oldest text, and its padded size is within the budget unless it is a single text.
"""

from collections.abc import Sequence


def next_batch(lengths: Sequence[int], budget: int) -> list[int]:
    """Chooses the oldest text and the texts of most similar length that fit.

    Args:
        lengths: number of tokens of each waiting text, oldest first. Not empty.
        budget: maximum of the longest length times the number of texts. A longer text is a batch of its own.

    Returns:
        Positions in `lengths`, shortest text first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = order.index(0)
    while True:
        fits = budget // max(lengths[order[high]], 1) > high - low + 1
        shorter = low > 0 and fits
        longer = high + 1 < len(order) and budget // max(lengths[order[high + 1]], 1) > high - low + 1
        if shorter and longer:  # choose the nearer one
            longer = lengths[order[high + 1]] - lengths[0] < lengths[0] - lengths[order[low - 1]]
        if longer:
            high += 1
        elif shorter:
            low -= 1
        else:
            return order[low : high + 1]
