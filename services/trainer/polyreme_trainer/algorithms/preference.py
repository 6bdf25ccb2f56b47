"""Losses of preference and reward-model training: one number per pair or answer, to be minimised. Pure.

A log-ratio is the sum over an answer's tokens of `log p - log p_ref`; c is the better (chosen) answer of a pair, r the worse one.

Invariant: every loss of a pair falls as the chosen answer gains on the rejected one, except from its target margin on (ipo).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """`-(1 - e) logsigmoid(beta h) - e logsigmoid(-beta h)`, h the difference of the log-ratios c - r.

    DPO, Rafailov et al. 2023 (arXiv 2305.18290), equation 7; with e > 0 conservative DPO, Mitchell 2023.

    Args:
        chosen, rejected: log-ratios [n].
        label_smoothing: e, the probability that a pair's labels are swapped; below 0.5.

    Returns:
        [n].
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`(h - 1 / (2 beta))^2`: IPO, Azar et al. 2023 (arXiv 2310.12036), equation 17, with beta for its tau.

    Args:
        chosen, rejected: log-ratios [n]; sums as in the paper, or means over each answer's tokens.

    Returns:
        [n].
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def kto(log_ratio: Tensor, good: Tensor, baseline: Tensor | float, beta: float, desirable: float, undesirable: float) -> Tensor:
    """`w (1 - sigmoid(s beta (l - z)))`, s = 1 if `good`, else -1: KTO, Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 8.

    Args:
        log_ratio: l, [n].
        good: bool [n].
        baseline: z, an estimate of the KL to the reference, 0 or more, without gradient (see `stage_rows.mismatched`).
        desirable, undesirable: w of good and of bad answers.

    Returns:
        [n].
    """
    sign = torch.where(good, log_ratio.new_tensor(1.0), log_ratio.new_tensor(-1.0))
    weight = torch.where(good, log_ratio.new_tensor(desirable), log_ratio.new_tensor(undesirable))
    return weight * (1 - torch.sigmoid(sign * beta * (log_ratio - baseline)))


def simpo(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """`-logsigmoid(beta (c - r) - gamma)`: SimPO, Meng et al. 2024 (arXiv 2405.14734), equation 6.

    Args:
        chosen, rejected: mean log-probability of each answer's tokens [n].
        gamma: target of the scaled difference.

    Returns:
        [n].
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def orpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """`-c - beta logsigmoid(log odds(c) - log odds(r))`: ORPO, Hong et al. 2024 (arXiv 2403.07691), equations 6 and 7.

    Args:
        chosen, rejected: mean log-probability of each answer's tokens [n].
        beta: lambda of the paper.

    Returns:
        [n].
    """
    return -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logprob: Tensor) -> Tensor:
    """`log(p / (1 - p))` of log p [n]; p is held below 1, where the odds end."""
    logprob = logprob.clamp(max=-1e-6)
    return logprob - torch.log(-torch.expm1(logprob))


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, tie: Tensor) -> Tensor:
    """`-logsigmoid(c - r - margin)` of scores; for a tie the mean of both orders, without margin.

    Bradley and Terry 1952, as a reward model's loss in Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the margin is that of
    Llama 2, Touvron et al. 2023 (arXiv 2307.09288), equation 2.

    Args:
        chosen, rejected: scores [n].
        margin: [n].
        tie: bool [n], neither answer is better.

    Returns:
        [n].
    """
    difference = chosen - rejected
    ordered = -logsigmoid(difference - margin)
    return torch.where(tie, -(logsigmoid(difference) + logsigmoid(-difference)) / 2, ordered)
