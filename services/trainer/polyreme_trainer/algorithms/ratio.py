"""Exponentials of log-ratios that stay finite.

Invariant: a bound on a value never removes its gradient, so that the token which has strayed furthest is still pulled back.
"""

import math

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratio beyond which its exponential is continued by the tangent; e^20 is finite in every floating-point type but half."""


def bounded_exp(x: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """`e^x` up to `limit`, and its tangent there beyond: continuous with its derivative, which is bounded and never 0."""
    return torch.exp(x.clamp(max=limit)) + math.exp(limit) * (x - limit).clamp(min=0)
