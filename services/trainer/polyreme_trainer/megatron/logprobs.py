"""Token log-probabilities from vocabulary-parallel logits, without ever gathering the logits.

Each rank reduces its own columns; two numbers per token cross the ranks (the columns' log-sum-exp and the target's logit), in one
collective. Padded columns are left out before anything is computed, so they have probability zero and gradient zero. All in fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, valid: int, temperature: float, group: Any) -> Tensor:
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
        if group is not None:
            log_sum, chosen = _combine(log_sum, chosen * here, group)
        ctx.save_for_backward(scaled, log_sum, column, here)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        return chosen - log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        scaled, log_sum, column, here = ctx.saved_tensors
        grad = (grads[0] / ctx.temperature).unsqueeze(1)
        out = (scaled - log_sum.unsqueeze(1)).exp_().mul_(-grad)
        if scaled.shape[1]:
            out.scatter_add_(1, column.unsqueeze(1), grad * here.unsqueeze(1))
        if out.shape != ctx.shape:
            padded = out.new_zeros(ctx.shape)
            padded[:, : scaled.shape[1]] = out
            out = padded
        return out.to(ctx.dtype), None, None, None, None, None


def _combine(log_sum: Tensor, chosen: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over all ranks' columns, and the one rank's target logit."""
    mine = torch.stack((log_sum, chosen))
    every = mine.new_empty((group.size(), *mine.shape))
    torch.distributed.all_gather(list(every), mine, group=group)
    return torch.logsumexp(every[:, 0], dim=0), every[:, 1].sum(0)


def token_logprobs(logits: Tensor, targets: Tensor, *, start: int, valid: int, temperature: float, group: Any = None) -> Tensor:
    """log softmax(logits / temperature) at the targets, differentiable in the logits.

    Args:
        logits: [tokens, columns of this rank].
        targets: [tokens] int64, in 0 .. vocabulary - 1.
        start: vocabulary index of this rank's first column.
        valid: how many of this rank's columns are not padding.
        group: tensor-parallel process group; None for one rank.

    Returns:
        fp32 [tokens] log-probabilities in nats.
    """
    logprobs: Tensor = _TokenLogprobs.apply(logits, targets, start, valid, temperature, group)
    return logprobs
