"""The training service's losses: those of the Tinker API with its names and formulas, and of presets, preferences and critics.

p is the log-probability of a token under the model, q its log-probability when it was sampled, A its advantage, w its weight and
r = exp(p - q). A padded token has A = 0 or w = 0. For a critic, p is the value of the sequence up to the token.

Invariant: a loss is a sum over tokens, sequences or pairs, so the gradients of the parts of a batch add up to that of the whole.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from polyreme_trainer.algorithms import losses, preference
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.ratio import bounded_exp

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


ServiceLoss = Callable[[Tensor, Inputs, Options, Tensor], Tensor]
"""(p [t], inputs [t] each, options, the sequence of each token int64 [t]) -> losses to minimise and sum; differentiable in p."""


def cross_entropy(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """-w p"""
    return -inputs["weights"] * p


def importance_sampling(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """-r A"""
    return -bounded_exp(p - inputs["logprobs"]) * inputs["advantages"]


def ppo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """-min(r A, clip(r, low, high) A): Schulman et al. 2017 (arXiv 1707.06347), equation 7. The thresholds bound r itself."""
    ratio, advantages = bounded_exp(p - inputs["logprobs"]), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def cispo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """-clip(r, low, high) A p, without a gradient through the ratio: MiniMax-M1, 2025 (arXiv 2506.13585), equation 4."""
    ratio = _clipped(bounded_exp(p.detach() - inputs["logprobs"]), options)
    return -ratio * inputs["advantages"] * p


def dro(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """-(A p - beta / 2 (p - q)^2): Richemond et al. 2024 (arXiv 2405.19107), with the advantage in place of reward and value."""
    return -(inputs["advantages"] * p - 0.5 * options["beta"] * (p - inputs["logprobs"]).square())


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def gspo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`ppo` with the geometric mean of the sequence's ratios for each token's: `losses.sequence_log_ratio`."""
    given = _policy_inputs(p, inputs, sequence, inputs["mask"] > 0)
    return losses.clip(given, given.behaviour, *_bounds(options), ratio="sequence").loss


def gmpo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.geometric_mean`."""
    given = _policy_inputs(p, inputs, sequence, inputs["mask"] > 0)
    return losses.geometric_mean(given, given.behaviour, options["low"], options["high"]).loss


def dual_clip(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.clip` with a bound on the loss of tokens with A < 0."""
    given = _policy_inputs(p, inputs, sequence)
    return losses.clip(given, given.behaviour, *_bounds(options), options["dual"]).loss


def sapo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.sapo`."""
    given = _policy_inputs(p, inputs, sequence)
    return losses.sapo(given, given.behaviour, options["tau_positive"], options["tau_negative"]).loss


def dppo_tv(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.tv_mask`."""
    given = _policy_inputs(p, inputs, sequence)
    return losses.tv_mask(given, given.behaviour, options["low"], options["high"], options["cap"]).loss


def reinforce(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.policy_gradient`."""
    given = _policy_inputs(p, inputs, sequence)
    return losses.policy_gradient(given, given.behaviour).loss


def dpo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`preference.dpo` on the sums of w (p - p_ref)."""
    chosen, rejected = _pairs(_sums(inputs["weights"] * (p - inputs["reference_logprobs"]), sequence))
    return preference.dpo(chosen, rejected, options["beta"], options["label_smoothing"])


def ipo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`preference.ipo` on the sums of w (p - p_ref)."""
    chosen, rejected = _pairs(_sums(inputs["weights"] * (p - inputs["reference_logprobs"]), sequence))
    return preference.ipo(chosen, rejected, options["beta"])


def simpo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`preference.simpo` on the means of p, weighted by w."""
    return preference.simpo(*_pairs(_means(p, inputs["weights"], sequence)), options["beta"], options["gamma"])


def orpo(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`preference.orpo` on the means of p, weighted by w."""
    return preference.orpo(*_pairs(_means(p, inputs["weights"], sequence)), options["beta"])


def value(p: Tensor, inputs: Inputs, options: Options, sequence: Tensor) -> Tensor:
    """`losses.value_loss` where the mask is not 0."""
    return inputs["mask"] * losses.value_loss(p, inputs["values"], inputs["returns"], options["value_clip"]).loss


def _policy_inputs(p: Tensor, inputs: Inputs, sequence: Tensor, used: Tensor | slice = slice(None)) -> LossInputs:
    """The tokens as inputs of a policy loss. `used`: bool [t], those that it sees."""
    behaviour, advantages = inputs.get("logprobs", p.detach())[used], inputs["advantages"][used]
    count = int(sequence.max()) + 1
    return LossInputs(p[used], behaviour, behaviour, advantages, torch.ones_like(behaviour), sequence[used], count)


def _bounds(options: Options) -> tuple[float, float]:
    """How far a ratio may be below and above 1."""
    return 1 - options["clip_low_threshold"], options["clip_high_threshold"] - 1


def _sums(x: Tensor, sequence: Tensor) -> Tensor:
    return x.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, x)


def _means(x: Tensor, weights: Tensor, sequence: Tensor) -> Tensor:
    return _sums(weights * x, sequence) / _sums(weights, sequence).clamp(min=torch.finfo(x.dtype).tiny)


def _pairs(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected one of each pair of consecutive sequences."""
    return sequences[0::2], sequences[1::2]


LOSSES: Mapping[str, ServiceLoss] = {
    loss.__name__: loss
    for loss in (
        *(cross_entropy, importance_sampling, ppo, cispo, dro),
        *(gspo, gmpo, dual_clip, sapo, dppo_tv, reinforce),
        *(dpo, ipo, simpo, orpo, value),
    )
}
"""By the API's name."""
