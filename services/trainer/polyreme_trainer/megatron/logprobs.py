"""Token log-probabilities and entropies from vocabulary-parallel logits, without gathering the logits.

Each rank reduces its own columns. The ranks exchange two or three numbers per token in one collective: the columns' log-sum-exp, the
target's logit and, for the entropy, the mean logit of the columns.

Invariant: padded columns are removed before any computation, so their probability and gradient are zero. All sums are in fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        valid: int,
        temperature: float,
        group: Any,
        with_entropy: bool,
    ) -> tuple[Tensor, ...]:
        scaled = logits[:, :valid].float()
        if temperature != 1.0:
            scaled = scaled / temperature
        column = targets - start
        here = (column >= 0) & (column < valid)
        column = column.clamp_(0, max(valid - 1, 0))
        if valid:
            log_sum = torch.logsumexp(scaled, dim=-1)
            chosen = scaled.gather(1, column.unsqueeze(1)).squeeze(1)
        else:
            log_sum = scaled.new_full(targets.shape, -torch.inf)
            chosen = scaled.new_zeros(targets.shape)
        parts = [log_sum, chosen]
        if with_entropy:
            parts.append(torch.linalg.vecdot((scaled - log_sum.unsqueeze(1)).exp_(), scaled))
        if group is not None:
            parts[1] = chosen * here
            parts = _combine(parts, group)
        ctx.save_for_backward(scaled, column, here, *parts)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        logprobs = parts[1] - parts[0]
        return (logprobs, parts[0] - parts[2]) if with_entropy else (logprobs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scaled, column, here, log_sum, _, *mean = ctx.saved_tensors
        grad = (grads[0] / ctx.temperature).unsqueeze(1)
        probabilities = (scaled - log_sum.unsqueeze(1)).exp_()
        if mean:  # the gradient of the entropy is probability * (mean logit - logit)
            spread = (mean[0].unsqueeze(1) - scaled).mul_((grads[1] / ctx.temperature).unsqueeze(1))
            out = probabilities.mul_(spread.sub_(grad))
        else:
            out = probabilities.mul_(-grad)
        if scaled.shape[1]:
            out.scatter_add_(1, column.unsqueeze(1), grad * here.unsqueeze(1))
        if out.shape != ctx.shape:
            padded = out.new_zeros(ctx.shape)
            padded[:, : scaled.shape[1]] = out
            out = padded
        return out.to(ctx.dtype), *[None] * 6


def _combine(parts: list[Tensor], group: Any) -> list[Tensor]:
    """Combines the numbers of all ranks' columns: the log-sum-exp, the target's logit and the mean logit."""
    mine = torch.stack(parts)
    every = mine.new_empty((group.size(), *mine.shape))
    torch.distributed.all_gather(list(every), mine, group=group)
    log_sum = torch.logsumexp(every[:, 0], dim=0)
    means = [(every[:, part] * (every[:, 0] - log_sum).exp()).sum(0) for part in range(2, len(parts))]
    return [log_sum, every[:, 1].sum(0), *means]


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int,
    valid: int,
    temperature: float,
    group: Any = None,
    with_entropy: bool = False,
) -> tuple[Tensor, ...]:
    """log softmax(logits / temperature) at the targets, differentiable in the logits.

    Args:
        logits: [tokens, columns of this rank].
        targets: [tokens] int64, in 0 .. vocabulary - 1.
        start: vocabulary index of this rank's first column.
        valid: the number of this rank's columns that are not padding.
        group: tensor-parallel process group; None for one rank.
        with_entropy: also return the entropy of softmax(logits / temperature).

    Returns:
        fp32 [tokens] log-probabilities in nats and, with `with_entropy`, fp32 [tokens] entropies in nats.
    """
    results: tuple[Tensor, ...] = _TokenLogprobs.apply(logits, targets, start, valid, temperature, group, with_entropy)
    return results
