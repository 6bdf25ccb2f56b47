"""Token log-probabilities and entropies from hidden states and a vocabulary-parallel output layer, block by block of the vocabulary.

A block of columns is reduced to two or three numbers per token: its log-sum-exp, the target's logit and, for the entropy, its mean logit.
Blocks are combined like tensor ranks, so the ranks exchange only these numbers, in one collective. With several blocks the backward pass
computes each block's logits again.

Invariant: at most `BLOCK_LOGITS` logits exist at a time on a rank, except for the smallest block. Padded columns are removed before any
computation, so their probability and gradient are zero. All sums are in fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

BLOCK_LOGITS = 2**24
"""The largest number of logits that exist at a time on a rank; 64 MiB in fp32, and as much again for their probabilities."""
_ALIGNED = 16
"""A block's columns are a multiple of this, so that its matrix products stay aligned."""


@dataclass(frozen=True)
class Head:
    """One rank's output layer, for computing log-probabilities from hidden states.

    Attributes:
        product: (x [n, k], weight [m, k]) -> x @ weight.T, outside autograd.
        start: vocabulary index of this rank's first column.
        valid: the number of this rank's columns that are not padding.
        temperature: the divisor of the logits.
        group: tensor-parallel process group; None for one rank.
        with_entropy: whether the entropy is computed too.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    start: int
    valid: int
    temperature: float
    group: Any = None
    with_entropy: bool = False

    def blocks(self, tokens: int, columns: int) -> Iterator[tuple[slice, int]]:
        """Yields each block's columns, and how many of them are not padding. There is one block if it is small enough."""
        width = columns
        if tokens * columns > BLOCK_LOGITS:
            width = max(_ALIGNED, BLOCK_LOGITS // tokens // _ALIGNED * _ALIGNED)
        for first in range(0, max(self.valid, 1), width):
            yield slice(first, min(first + width, columns)), max(0, min(width, self.valid - first))

    def logits(self, hidden: Tensor, weight: Tensor, valid: int) -> Tensor:
        """A block's logits divided by the temperature, fp32 [tokens, valid]. The caller owns them."""
        scaled = self.product(hidden, weight)[:, :valid].float()
        return scaled if self.temperature == 1.0 else scaled.div_(self.temperature)

    def targets(self, targets: Tensor, block: slice, valid: int) -> tuple[Tensor, Tensor]:
        """The targets' columns in a block, int64 [tokens, 1], and whether the block has them, bool [tokens]."""
        column = targets - (self.start + block.start)
        here = (column >= 0) & (column < valid)
        return column.clamp_(0, max(valid - 1, 0)).unsqueeze(1), here


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, ...]:
        blocks = list(head.blocks(len(targets), len(weight)))
        every, kept = [], None
        for block, valid in blocks:
            scaled = head.logits(hidden, weight[block], valid)
            every.append(torch.stack(_reduce(scaled, *head.targets(targets, block, valid), head.with_entropy)))
            kept = scaled if len(blocks) == 1 else None
            del scaled  # before the next block's logits exist
        parts = _combine(torch.stack(every))
        if head.group is not None:
            gathered = parts.new_empty((head.group.size(), *parts.shape))
            torch.distributed.all_gather(list(gathered), parts, group=head.group)
            parts = _combine(gathered)
        log_sum, chosen, *mean = parts
        ctx.save_for_backward(hidden, weight, targets, kept, log_sum, *mean)
        ctx.head, ctx.blocks = head, blocks
        logprobs = chosen - log_sum
        return (logprobs, log_sum - mean[0]) if mean else (logprobs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, log_sum, *mean = ctx.saved_tensors
        head, blocks = ctx.head, ctx.blocks
        scaled_grads = [(grad / head.temperature).unsqueeze(1) for grad in grads]
        for_hidden, for_weight, _, _ = ctx.needs_input_grad
        grad_hidden = grad_weight = reduced = None
        if for_weight and blocks[0][0].stop < len(weight):  # several blocks, or only padding columns after the single one
            grad_weight = torch.zeros_like(weight)
        for block, valid in blocks:
            scaled = head.logits(hidden, weight[block], valid) if kept is None else kept
            grad = _gradient(scaled, log_sum, mean, scaled_grads, *head.targets(targets, block, valid))
            if padding := block.stop - block.start - valid:
                grad = torch.nn.functional.pad(grad, (0, padding))
            grad = grad.to(hidden.dtype)
            if for_hidden:
                part = head.product(grad, weight[block].t())
                grad_hidden = part if len(blocks) == 1 else part.float() if grad_hidden is None else grad_hidden.add_(part)
                if block == blocks[-1][0]:
                    grad_hidden = grad_hidden.to(hidden.dtype)
                    if head.group is not None:
                        reduced = torch.distributed.all_reduce(grad_hidden, group=head.group, async_op=True)
            if for_weight:
                part = head.product(grad.t(), hidden.t())
                if grad_weight is None:
                    grad_weight = part
                else:
                    grad_weight[block] = part
            del scaled, grad  # before the next block's logits exist
        if reduced is not None:
            reduced.wait()
        return grad_hidden, grad_weight, None, None


def _reduce(scaled: Tensor, column: Tensor, here: Tensor, with_entropy: bool) -> list[Tensor]:
    """A block's numbers, each fp32 [tokens]: log-sum-exp, the target's logit or 0, and the mean logit under the block's softmax."""
    if scaled.shape[1]:
        log_sum = torch.logsumexp(scaled, dim=-1)
        chosen = scaled.gather(1, column).squeeze(1)
    else:
        log_sum = scaled.new_full(here.shape, -torch.inf)
        chosen = scaled.new_zeros(here.shape)
    parts = [log_sum, chosen.masked_fill(~here, 0)]
    if with_entropy:
        parts.append(torch.linalg.vecdot((scaled - log_sum.unsqueeze(1)).exp_(), scaled))
    return parts


def _combine(every: Tensor) -> Tensor:
    """The numbers of all columns [parts, tokens] from those of their blocks [blocks, parts, tokens]."""
    if len(every) == 1:
        return every[0]
    log_sum = torch.logsumexp(every[:, 0], dim=0)
    means = [(every[:, part] * (every[:, 0] - log_sum).exp()).sum(0) for part in range(2, every.shape[1])]
    return torch.stack([log_sum, every[:, 1].sum(0), *means])


def _gradient(scaled: Tensor, log_sum: Tensor, mean: list[Tensor], grads: list[Tensor], column: Tensor, here: Tensor) -> Tensor:
    """The gradient of a block's logits [tokens, columns]. The entropy's is probability * (mean logit - logit)."""
    out = (scaled - log_sum.unsqueeze(1)).exp_()
    if mean:
        out.mul_((mean[0].unsqueeze(1) - scaled).mul_(grads[1]).sub_(grads[0]))
    else:
        out.mul_(-grads[0])
    if scaled.shape[1]:
        out.scatter_add_(1, column, grads[0] * here.unsqueeze(1))
    return out


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, ...]:
    """log softmax(hidden @ weight.T / temperature) at the targets, differentiable in `hidden` and `weight`.

    Args:
        hidden: [tokens, hidden], the same on all tensor ranks; its gradient is summed over them.
        weight: [columns of this rank, hidden], with its padding.
        targets: [tokens] int64, in 0 .. vocabulary - 1.

    Returns:
        fp32 [tokens] log-probabilities in nats and, with `with_entropy`, fp32 [tokens] entropies in nats.
    """
    results: tuple[Tensor, ...] = _TokenLogprobs.apply(hidden, weight, targets, head)
    return results
