"""Per-token losses and divergences. Reduction is the caller's: a sum over its tokens divided by the global batch's token count.

Every function takes and returns float32 tensors of one shape and is differentiable in its first argument.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound on |log ratio| before the exponential: e^20 is finite in float32, and a token that far off is clipped anyway."""


def clipped_surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The negative clipped objective of each token: `-min(r A, clip(r, 1 - low, 1 + high) A)`, r = exp(new - old).

    PPO, Schulman et al. 2017 (arXiv 1707.06347), equation 7; unequal bounds: DAPO's clip-higher, Yu et al. 2025
    (arXiv 2503.14476), equation 8.

    Args:
        logprobs: of the sampled tokens under the policy being trained.
        old_logprobs: under the policy before this iteration's first optimizer step; carries no gradient.
        advantages: broadcastable to `logprobs`.
        low, high: the ratio is clipped to [1 - low, 1 + high].
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def importance_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """The factor `min(e^(old - behaviour), cap)` by which the surrogate of each token is corrected for who sampled it.

    The surrogate takes its expectation over tokens of the policy before the step (old), while the tokens come from the behaviour
    policies: older versions, and the replica's engine. Weighted by their ratio it is the decoupled objective of Hilton et al. 2021
    (arXiv 2110.00641), whose clipping is still measured from the policy before the step. The cap bounds the variance at
    the price of a bias: truncated importance sampling, Ionides 2008 (J. Comput. Graph. Stat. 17), per token as in Yao et al. 2025,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Same shape as the arguments; carries no gradient.

    Args:
        old_logprobs: of the sampled tokens under the learner's policy before this iteration's first optimizer step.
        behaviour_logprobs: under the policy that sampled each token, as the replica reported them.
        cap: at least 1; a policy that was its own behaviour has weights of 1.
    """
    log_ratio = (old_logprobs - behaviour_logprobs).detach()
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clamp(max=cap)


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) at each sampled token: `e^d - d - 1` with d = reference - policy.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); as GRPO's penalty: arXiv 2402.03300,
    equation 4. Never negative, and unbiased for tokens sampled from the policy.
    """
    delta = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(delta) - delta


def mismatch_kl(learner_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """k3 of KL(behaviour || learner) at each token: how far the replica's engine is from the learner's model.

    With one set of weights on both sides it is zero up to rounding; a value that grows says that weights, temperature or
    tokens differ between the two. Same shape as the arguments; carries no gradient.
    """
    return k3(behaviour_logprobs.detach(), learner_logprobs.detach())
