"""Estimates of KL(policy || reference) at each sampled token, and the coefficient of their penalty.

d is the log-ratio of policy to reference at the sampled token. k1 to k3: Schulman 2020, "Approximating KL divergence".

Invariant: no estimate loses its gradient however large d is.
"""

import torch
from torch import Tensor

from polyreme.config.recipe import KlEstimator
from polyreme_trainer.algorithms.ratio import bounded_exp

K3_LIMIT = 10.0
"""-d beyond which k3 is continued by its tangent: one token the policy has all but given up must not outweigh the batch."""
CONTROLLER_BOUND = 0.2
"""Largest relative error that the adaptive controller answers to."""


def estimate(estimator: KlEstimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The estimate at each token, [t].

    - k1: d, unbiased, of either sign; its gradient is 0 in expectation over tokens of the policy.
    - k2: d^2 / 2, biased, never negative; its gradient is that of the KL in expectation.
    - k3: e^-d - 1 + d, unbiased and never negative; its gradient is that of the reversed KL in expectation.
    - abs: |d|.
    - with "+": the value of the estimator and the gradient of k2.

    Args:
        logprobs: [t], under the policy; carries the gradient.
        reference: [t].
    """
    d = logprobs - reference
    if estimator.endswith("+"):
        k2 = d**2 / 2
        return _value(estimator.removesuffix("+"), d).detach() + k2 - k2.detach()
    return _value(estimator, d)


def _value(name: str, d: Tensor) -> Tensor:
    match name:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "abs":
            return d.abs()
        case "k3":
            near = d > -K3_LIMIT  # expm1 is exact where e^-d - 1 would cancel
            return torch.where(near, torch.expm1(torch.where(near, -d, 0.0)), bounded_exp(-d, K3_LIMIT) - 1) + d
    raise ValueError(f"no KL estimator is called {name}")


def adapt(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient of the next iteration: `coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)`.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    Args:
        coef: of the iteration that `kl` was measured in.
        kl: mean over samples of the KL summed over a sample's tokens, in nats.
        target: in the same unit.
        horizon: samples after which an error of 20% has changed the coefficient by 20%.
        samples: of the iteration.
    """
    error = min(max(kl / target - 1.0, -CONTROLLER_BOUND), CONTROLLER_BOUND)
    return coef * (1.0 + error * samples / horizon)
