"""Corrects for samples from another policy: an older version, or the replica's engine, whose numbers differ from the learner's.

The surrogate is an expectation over tokens of the policy before the step (old), but the sampler (behaviour) produced the tokens.
w = e^(old - behaviour) corrects the difference (the decoupled objective of Hilton et al. 2021, arXiv 2110.00641). Bounds on w
trade variance for bias. Masks drop tokens whose weight is too extreme to correct.

Invariant: a factor carries no gradient and changes no divisor. Where old and behaviour are equal, it is exactly 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme.config.recipes.recipe import Correction, GeometricMask, IcePop, SequenceTis, TokenTis, Veto
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.kl import estimate
from polyreme_trainer.algorithms.metrics import Metrics, maximum_of, mean_of
from polyreme_trainer.algorithms.ratio import LOG_RATIO_LIMIT


def log_weights(inputs: LossInputs) -> Tensor:
    """log w of each token, [t], without gradient."""
    return (inputs.old - inputs.behaviour).detach()


def factor(correction: Correction, log_w: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor | None]:
    """The factor of each token's surrogate, [t], and which weights were truncated to a cap, bool [t]; None without a cap.

    - token_tis: min(w, cap), truncated importance sampling: Ionides 2008 (J. Comput. Graph. Stat. 17); per token, Yao et al.
      2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    - sequence_tis: min(product of w over the sequence, cap).
    - icepop: w where low <= w <= high, else 0 (arXiv 2510.18855).
    - geometric_mask: 1 where low <= exp(mean log w of the sequence) <= high, else 0.
    - veto: 0 for every token of a sequence with some w below low or above high, else 1.
    """
    w = _exp(log_w)
    match correction:
        case TokenTis(cap=cap):
            return w.clamp(max=cap), w > cap
        case SequenceTis(cap=cap):
            product = _exp(inputs.sequence_sum(log_w))[inputs.sequence]
            return product.clamp(max=cap), product > cap
        case IcePop(low=low, high=high):
            return torch.where((w >= low) & (w <= high), w, 0.0), None
        case GeometricMask(low=low, high=high):
            mean = _exp(inputs.sequence_mean(log_w))
            return ((mean >= low) & (mean <= high)).to(w.dtype)[inputs.sequence], None
        case Veto(low=low, high=high):
            outlier = w < low if high is None else (w < low) | (w > high)
            return (inputs.sequence_sum(outlier.to(w.dtype)) == 0).to(w.dtype)[inputs.sequence], None


def correct(corrections: Sequence[Correction], inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The product of the factors, [t], and metrics of the weights.

    Metrics: `importance_weight` and `importance_weight_max` are w's mean and maximum. `off_policy_kl` is the k3 estimate of
    KL(behaviour || old). `mismatch_kl` is the same over the sequences that the policy before the step sampled completely, so it
    measures how the engines differ. With corrections there are also `correction_factor`, `dropped_token_fraction`,
    `dropped_sequence_fraction` and, with a cap, `truncated_fraction`: the fraction of tokens whose weight was truncated.
    """
    log_w = log_weights(inputs)
    w, k3 = _exp(log_w), estimate("k3", inputs.behaviour, inputs.old.detach())
    metrics: Metrics = {"importance_weight": mean_of(w), "importance_weight_max": maximum_of(w), "off_policy_kl": mean_of(k3)}
    if inputs.fresh is not None:
        metrics["mismatch_kl"] = mean_of(k3, inputs.fresh.to(k3.dtype))
    total = torch.ones_like(w)
    if not corrections:
        return total, metrics
    for correction in corrections:
        each, truncated = factor(correction, log_w, inputs)
        total = total * each
        if truncated is not None:
            metrics["truncated_fraction"] = mean_of(truncated)
    kept, tokens = inputs.sequence_sum((total > 0).to(w.dtype)), inputs.sequence_sum(torch.ones_like(w))
    metrics |= {
        "correction_factor": mean_of(total),
        "dropped_token_fraction": mean_of(total == 0),
        "dropped_sequence_fraction": mean_of(kept == 0, (tokens > 0).to(w.dtype)),
    }
    return total, metrics


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x.clamp(max=LOG_RATIO_LIMIT))
