"""The losses of the training service, with the names and formulas of the Tinker API: each is a sum over tokens.

p is the log-probability of a token under the model, q its log-probability when it was sampled, A its advantage, w its weight and
r = exp(p - q). A padded token has A = 0 or w = 0.

Invariant: a loss is a sum over tokens, so the gradients of the parts of a batch add up to that of the whole.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyreme_trainer.algorithms.ratio import bounded_exp

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


TokenLoss = Callable[[Tensor, Inputs, Options], Tensor]
"""(p [t], inputs [t] each, options) -> the loss of each token, [t], to be minimised and summed; differentiable in p."""


def cross_entropy(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-w p"""
    return -inputs["weights"] * p


def importance_sampling(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-r A"""
    return -bounded_exp(p - inputs["logprobs"]) * inputs["advantages"]


def ppo(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-min(r A, clip(r, low, high) A): Schulman et al. 2017 (arXiv 1707.06347), equation 7. The thresholds bound the ratio itself."""
    ratio, advantages = bounded_exp(p - inputs["logprobs"]), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def cispo(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-clip(r, low, high) A p, without a gradient through the ratio: MiniMax-M1, 2025 (arXiv 2506.13585), equation 4."""
    ratio = _clipped(bounded_exp(p.detach() - inputs["logprobs"]), options)
    return -ratio * inputs["advantages"] * p


def dro(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """-(A p - beta / 2 (p - q)^2): Richemond et al. 2024 (arXiv 2405.19107), with the advantage in place of reward and value."""
    return -(inputs["advantages"] * p - 0.5 * options["beta"] * (p - inputs["logprobs"]).square())


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}
"""By the API's name."""
