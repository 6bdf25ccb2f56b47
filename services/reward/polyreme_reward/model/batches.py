"""Chooses the next batch; pure. Invariant: the oldest text is always in it, and its padded size stays within the budget."""

from collections.abc import Sequence


def next_batch(lengths: Sequence[int], budget: int) -> list[int]:
    """Chooses the next batch: the oldest text, and those nearest to it in length as long as they fit.

    Args:
        lengths: tokens of each waiting text, the oldest first; at least one.
        budget: the most that the longest length times the number of texts may be; a text beyond it goes alone.

    Returns:
        Positions in `lengths`, shortest text first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = order.index(0)
    while True:
        fits = budget // max(lengths[order[high]], 1) > high - low + 1
        shorter = low > 0 and fits
        longer = high + 1 < len(order) and budget // max(lengths[order[high + 1]], 1) > high - low + 1
        if shorter and longer:  # the nearer one
            longer = lengths[order[high + 1]] - lengths[0] < lengths[0] - lengths[order[low - 1]]
        if longer:
            high += 1
        elif shorter:
            low -= 1
        else:
            return order[low : high + 1]
