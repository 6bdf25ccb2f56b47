"""Estimators of KL(policy || reference) at each sampled token, and the controller of the penalty's coefficient.

d is the log-ratio of policy to reference at the sampled token. k1 to k3: Schulman 2020, "Approximating KL divergence".

Invariant: no estimator's gradient vanishes for large d.
"""

import torch
from torch import Tensor

from polyreme.config.recipes.recipe import KlEstimator
from polyreme_trainer.algorithms.ratio import bounded_exp

K3_LIMIT = 10.0
"""Beyond this -d, k3 continues as its tangent: one token that the policy has almost abandoned must not dominate the batch."""
CONTROLLER_BOUND = 0.2
"""The adaptive controller clips its relative error to this bound."""


def estimate(estimator: KlEstimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """The estimate at each token, [t].

    - k1: d; unbiased and signed. Its expected gradient over tokens of the policy is 0.
    - k2: d^2 / 2; biased and never negative. Its expected gradient is that of the KL.
    - k3: e^-d - 1 + d; unbiased and never negative. Its expected gradient is that of the reverse KL.
    - abs: |d|.
    - with "+": the estimator's value with the gradient of k2.

    Args:
        logprobs: [t], log-probabilities under the policy; carries the gradient.
        reference: [t], log-probabilities under the reference.
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
    raise ValueError(f"expected a KL estimator; found {name}")


def adapt(coef: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient of the next iteration: `coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)`.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    Args:
        coef: the coefficient of the iteration in which `kl` was measured.
        kl: mean over samples of a sample's KL in nats: the sum or the mean over its tokens.
        target: the wanted value of `kl`.
        horizon: the number of samples after which an error of 20% has changed the coefficient by 20%.
        samples: the number of samples of the iteration.
    """
    error = min(max(kl / target - 1.0, -CONTROLLER_BOUND), CONTROLLER_BOUND)
    return coef * (1.0 + error * samples / horizon)
