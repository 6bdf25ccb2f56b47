"""Additive metrics: name -> (sum, weight), where the metric's value is sum / weight.

Invariant: `combine` of the parts' metrics equals the metrics of the whole, however it was split. An extreme (`*_max`, `*_min`) is
the largest or smallest value among the parts instead, and its weight is 1.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]
"""A loss's metrics: scalar tensors without gradient on the device of its inputs, so that no micro-batch waits for a copy."""


def mean_of(x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean of x [t], or its weighted mean."""
    x = x.detach() if x.is_floating_point() else x.float()
    weight = torch.ones_like(x) if weight is None else weight
    return (x * weight).sum(), weight.sum()


def maximum_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of x [t], for a name that ends in `_max`; -inf when x is empty."""
    largest = x.detach().max() if x.numel() else x.new_tensor(-torch.inf)
    return largest, torch.ones_like(largest)


def combine(parts: Iterable[Mapping[str, tuple[float | Tensor, float | Tensor]]]) -> dict[str, tuple[float, float]]:
    """The combined metrics of all parts, as numbers."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            new = (float(value), float(weight))
            old = total.get(name)
            if old is None:
                total[name] = new
            elif name.endswith("_max"):
                total[name] = (max(old[0], new[0]), 1.0)
            elif name.endswith("_min"):
                total[name] = (min(old[0], new[0]), 1.0)
            else:
                total[name] = (old[0] + new[0], old[1] + new[1])
    return total


def finish(metrics: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The value of every metric. Metrics with weight 0 have no value and are omitted."""
    return {name: value / weight for name, (value, weight) in metrics.items() if weight != 0}
