"""Policy and value losses: one number per trained token, to be minimised, differentiable in the policy's log-probabilities.

r is the probability ratio of the policy to an anchor: the policy before the iteration's first step, or the sampler itself.
`aggregation` reduces the token losses to one number. `correction` multiplies them by a factor for off-policy tokens.

A further policy loss is a class in `polyreme.config.recipes.recipe`, its formula here, and a line in SURROGATES.

Invariant: at r = 1 every policy loss has the gradient `-A` with respect to the token's log-probability.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from polyreme.config.recipes.recipe import Cispo, Clip, GeometricMean, PolicyGradient, Primitive, Sapo, TvMask
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.ratio import bounded_exp


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, and the tokens on which its bounds acted.

    Attributes:
        loss: [t].
        flags: metric name -> bool [t]; the metric is the fraction of true entries.
    """

    loss: Tensor
    flags: Mapping[str, Tensor] = field(default_factory=dict)


def clip(
    inputs: LossInputs,
    anchor: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    ratio: Literal["token", "sequence"] = "token",
) -> TokenLoss:
    """`max(-A r, -A clip(r, 1 - low, 1 + high))`: PPO, Schulman et al. 2017 (arXiv 1707.06347), equation 7.

    Unequal bounds are DAPO's clip-higher, Yu et al. 2025 (arXiv 2503.14476), equation 8. With `dual`, `-A dual` bounds the loss
    for A < 0: dual clip, Ye et al. 2019 (arXiv 1912.09729), equation 5. For `ratio="sequence"`, r is `sequence_log_ratio`'s.

    `clip_fraction` counts the tokens whose clipped branch is larger, which removes their gradient. `dual_clip_fraction` counts
    the tokens at the bound of the dual clip.
    """
    advantages, log_ratio = inputs.advantages, inputs.logprobs - anchor
    r = bounded_exp(sequence_log_ratio(log_ratio, inputs) if ratio == "sequence" else log_ratio)
    free, clipped = -advantages * r, -advantages * r.clamp(1 - low, 1 + high)
    loss, flags = torch.maximum(free, clipped), {"clip_fraction": clipped > free}
    if dual is not None:
        bound = -advantages * dual
        flags["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, flags)


def sequence_log_ratio(log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    """The mean log-ratio of each token's sequence, [t], with the gradient of the token's own log-ratio.

    The token form of GSPO, Zheng et al. 2025 (arXiv 2507.18071), equation 14. With one advantage per sequence and
    seq-mean-token-mean, its gradient is that of the sequence's ratio.
    """
    mean = inputs.sequence_mean(log_ratio.detach())[inputs.sequence]
    return mean + log_ratio - log_ratio.detach()


def geometric_mean(inputs: LossInputs, anchor: Tensor, low: float, high: float) -> TokenLoss:
    """`-A exp(mean of clipped log-ratios)`, with the mean over a sequence: GMPO, Zhao et al. 2025 (arXiv 2507.20673), equation 4.

    A token's log-ratio is clipped to [-low, high] on the side on which PPO clips: above for A > 0, below for A < 0.
    """
    sign, log_ratio = torch.sign(inputs.advantages), inputs.logprobs - anchor
    free, clipped = sign * log_ratio, sign * log_ratio.clamp(-low, high)
    mean = inputs.sequence_mean(sign * torch.minimum(free, clipped))
    return TokenLoss(-inputs.advantages * bounded_exp(mean)[inputs.sequence], {"clip_fraction": clipped < free})


def cispo(inputs: LossInputs, anchor: Tensor, low: float, high: float) -> TokenLoss:
    """`-clip(r, 1 - low, 1 + high) A log p`, without gradient through `clip`: CISPO, MiniMax 2025 (arXiv 2506.13585), equation 4.

    Clipping bounds a token's weight and never removes its gradient.
    """
    ratio, advantages = bounded_exp(inputs.logprobs.detach() - anchor), inputs.advantages
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    loss = -ratio.clamp(1 - low, 1 + high) * advantages * inputs.logprobs
    return TokenLoss(loss, {"clip_fraction": outside & (advantages != 0)})


def sapo(inputs: LossInputs, anchor: Tensor, tau_positive: float, tau_negative: float) -> TokenLoss:
    """`-(4 / tau) sigmoid(tau (r - 1)) A` instead of a clip, tau by the sign of A: SAPO, Gao et al. 2025 (arXiv 2511.20347)."""
    ratio, advantages = bounded_exp(inputs.logprobs - anchor), inputs.advantages
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return TokenLoss(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages)


def tv_mask(inputs: LossInputs, anchor: Tensor, low: float, high: float, cap: float) -> TokenLoss:
    """`-min(r, cap) A log p` without tokens that the update would move further away: DPPO-TV, Qi et al. 2026 (arXiv 2602.04879).

    A token is masked when A > 0 and its probability is more than `high` above the sampler's, or when A < 0 and its probability is
    more than `low` below the sampler's, which is the anchor. r is the ratio to the sampler, without gradient.
    """
    logprobs, advantages = inputs.logprobs, inputs.advantages
    probability, sampled = torch.exp(logprobs.detach()), torch.exp(anchor)
    masked = torch.where(advantages > 0, probability - sampled > high, sampled - probability > low) & (advantages != 0)
    ratio = bounded_exp(logprobs.detach() - anchor).clamp(max=cap)
    return TokenLoss(torch.where(masked, 0.0, -ratio * advantages * logprobs), {"clip_fraction": masked})


def policy_gradient(inputs: LossInputs, anchor: Tensor) -> TokenLoss:
    """`-A log p`: REINFORCE, Williams 1992 (Machine Learning 8). Unbiased only for the policy that sampled the token."""
    return TokenLoss(-inputs.advantages * inputs.logprobs)


def value_loss(new_values: Tensor, values: Tensor, returns: Tensor, clip: float | None) -> TokenLoss:
    """`max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2`, where V_old is V before the iteration's first step.

    OpenAI's PPO has this loss; the clip limits the critic's step as PPO's clip limits the policy's. `value_clip_fraction` counts
    the tokens whose clipped branch is larger.

    Args:
        new_values: [t], carries the gradient.
        values: [t], V_old.
        returns: [t], G.
        clip: the bound; None for the plain squared error.
    """
    free = (new_values - returns) ** 2
    if clip is None:
        return TokenLoss(free / 2)
    clipped = (torch.clamp(new_values, values - clip, values + clip) - returns) ** 2
    return TokenLoss(torch.maximum(free, clipped) / 2, {"value_clip_fraction": clipped > free})


SURROGATES: Mapping[type[Primitive], Callable[..., TokenLoss]] = {
    Clip: clip,
    GeometricMean: geometric_mean,
    Cispo: cispo,
    Sapo: sapo,
    TvMask: tv_mask,
    PolicyGradient: policy_gradient,
}
"""Each policy loss's function. It gets a micro-batch, the anchor's log-probabilities [t], and the recipe's settings by name."""
