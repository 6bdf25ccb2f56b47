"""Exponentials of log-ratios that stay finite.

Invariant: a bound on a value never removes its gradient, so even the token with the most extreme ratio is pulled back.
"""

import math

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Beyond this log-ratio, the exponential continues as its tangent. e^20 is finite in every floating-point type but half."""


def bounded_exp(x: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """`e^x` up to `limit`, then the tangent at `limit`. Value and derivative are continuous; the latter is bounded, never 0."""
    return torch.exp(x.clamp(max=limit)) + math.exp(limit) * (x - limit).clamp(min=0)
