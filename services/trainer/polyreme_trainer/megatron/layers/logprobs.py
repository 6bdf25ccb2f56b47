"""Token log-probabilities and entropies from hidden states and a vocabulary-parallel output layer, by blocks of the vocabulary.

A block of columns is reduced to two or three numbers per token: its log-sum-exp, the target's logit and, for the entropy, its
mean logit. Blocks are combined like tensor ranks, so the ranks exchange only these numbers, in one collective. With several
blocks the backward pass computes each block's logits again.

Invariant: at most `BLOCK_LOGITS` logits exist at once on a rank (`ACCELERATOR_LOGITS` on an accelerator), except for the smallest
block. Padded columns are removed before any computation, so their probability and gradient are 0. All sums are fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

BLOCK_LOGITS = 2**24
"""The largest number of logits that exist at a time on a rank; 64 MiB in fp32, and as much again for their probabilities."""
ACCELERATOR_LOGITS = 2**26
"""The same on an accelerator, whose matrix products need larger blocks; 256 MiB in fp32."""
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
        block_logits: the largest number of logits of a block; None: that of the device.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    start: int
    valid: int
    temperature: float
    group: Any = None
    with_entropy: bool = False
    block_logits: int | None = None

    def blocks(self, tokens: int, weight: Tensor) -> Iterator[tuple[slice, int]]:
        """Yields each block's columns, and how many of them are not padding. There is one block if it is small enough."""
        columns = width = len(weight)
        most = self.block_logits or (BLOCK_LOGITS if weight.device.type == "cpu" else ACCELERATOR_LOGITS)
        if tokens * columns > most:
            width = max(_ALIGNED, most // tokens // _ALIGNED * _ALIGNED)
        for first in range(0, max(self.valid, 1), width):
            yield slice(first, min(first + width, columns)), max(0, min(width, self.valid - first))

    def logits(self, hidden: Tensor, weight: Tensor, valid: int) -> Tensor:
        """A block's logits divided by the temperature, [tokens, valid]: in fp32, or in the model's dtype if nothing was divided.
        The caller owns them."""
        product = self.product(hidden, weight)[:, :valid]
        return product if self.temperature == 1.0 else product.float().div_(self.temperature)

    def targets(self, targets: Tensor, block: slice, valid: int) -> tuple[Tensor, Tensor]:
        """The targets' columns in a block, int64 [tokens, 1], and whether the block has them, bool [tokens]."""
        column = targets - (self.start + block.start)
        here = (column >= 0) & (column < valid)
        return column.clamp_(0, max(valid - 1, 0)).unsqueeze(1), here


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, ...]:
        blocks = list(head.blocks(len(targets), weight))
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
        logprobs = chosen - log_sum
        ctx.save_for_backward(hidden, weight, targets, logprobs, log_sum, *mean)
        ctx.head, ctx.blocks, ctx.kept = head, blocks, kept
        return (logprobs, log_sum - mean[0]) if mean else (logprobs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logprobs, log_sum, *mean = ctx.saved_tensors
        head, blocks, kept, ctx.kept = ctx.head, ctx.blocks, ctx.kept, None  # the gradient may take the place of kept logits
        scaled_grads = [(grad / head.temperature).unsqueeze(1) for grad in grads]
        # Without entropy, a row of the logits' gradient is a factor times numbers that do not depend on it: it multiplies the
        # short rows of hidden states, not the long ones of logits.
        factor = -scaled_grads[0]
        rows = hidden if mean else (hidden * factor).to(hidden.dtype)
        for_hidden, for_weight, _, _ = ctx.needs_input_grad
        grad_hidden = grad_weight = reduced = None
        if for_weight and blocks[0][0].stop < len(weight):  # several blocks, or only padding columns after the single one
            grad_weight = torch.zeros_like(weight)
        for block, valid in blocks:
            scaled = head.logits(hidden, weight[block], valid) if kept is None else kept
            where = head.targets(targets, block, valid)
            if mean:
                grad = _gradient_with_entropy(scaled, log_sum, mean[0], scaled_grads, *where).to(hidden.dtype)
            else:
                grad = _gradient(scaled, log_sum, logprobs, hidden.dtype, *where)
            if padding := block.stop - block.start - valid:
                grad = torch.nn.functional.pad(grad, (0, padding))
            if for_hidden:
                part = head.product(grad, weight[block].t())
                grad_hidden = part if len(blocks) == 1 else part.float() if grad_hidden is None else grad_hidden.add_(part)
                if block == blocks[-1][0]:
                    grad_hidden = (grad_hidden if mean else grad_hidden.mul_(factor)).to(hidden.dtype)
                    if head.group is not None:
                        reduced = torch.distributed.all_reduce(grad_hidden, group=head.group, async_op=True)
            if for_weight:
                part = head.product(grad.t(), rows.t())
                if grad_weight is None:
                    grad_weight = part
                else:
                    grad_weight[block] = part
            del scaled, grad  # before the next block's logits exist
        if reduced is not None:
            reduced.wait()
        return grad_hidden, grad_weight, None, None


def _reduce(scaled: Tensor, column: Tensor, here: Tensor, with_entropy: bool) -> list[Tensor]:
    """A block's numbers, each fp32 [tokens]: log-sum-exp, the target's logit or 0, and mean logit under the block's softmax."""
    if not scaled.shape[1]:
        empty = torch.zeros(here.shape, dtype=torch.float32, device=here.device)
        return [empty - torch.inf, *[empty] * (1 + with_entropy)]
    logs = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)  # one pass, where logsumexp makes four
    chosen = scaled.gather(1, column).squeeze(1).float()
    parts = [chosen - logs.gather(1, column).squeeze(1), chosen.masked_fill(~here, 0)]
    if with_entropy:
        parts.append(torch.linalg.vecdot(logs.exp_(), scaled.float()))
    return parts


def _combine(every: Tensor) -> Tensor:
    """The numbers of all columns [parts, tokens] from those of their blocks [blocks, parts, tokens]."""
    if len(every) == 1:
        return every[0]
    log_sum = torch.logsumexp(every[:, 0], dim=0)
    means = [(every[:, part] * (every[:, 0] - log_sum).exp()).sum(0) for part in range(2, every.shape[1])]
    return torch.stack([log_sum, every[:, 1].sum(0), *means])


def _gradient(scaled: Tensor, log_sum: Tensor, logprobs: Tensor, dtype: torch.dtype, column: Tensor, here: Tensor) -> Tensor:
    """The gradient of the negative log-probability with respect to a block's logits, in a dtype [tokens, columns]: the
    probability, and the target's minus 1. fp32 logits are overwritten."""
    # fp32 by promotion
    shifted = torch.sub(scaled, log_sum.unsqueeze(1), out=scaled if scaled.dtype == torch.float32 else None)
    out = torch.exp(shifted, out=shifted if dtype == shifted.dtype else torch.empty_like(shifted, dtype=dtype))
    if scaled.shape[1]:
        # By expm1, because a probability near 1 has no digits left in bfloat16 for its difference from 1.
        at_target = torch.where(here.unsqueeze(1), torch.expm1(logprobs).unsqueeze(1).to(dtype), out.gather(1, column))
        out.scatter_(1, column, at_target)
    return out


def _gradient_with_entropy(
    scaled: Tensor, log_sum: Tensor, mean: Tensor, grads: list[Tensor], column: Tensor, here: Tensor
) -> Tensor:
    """The gradient of a block's logits, fp32 [tokens, columns]. The entropy's is probability * (mean logit - logit)."""
    out = torch.sub(scaled, log_sum.unsqueeze(1)).exp_()
    out.mul_(torch.sub(mean.unsqueeze(1), scaled).mul_(grads[1]).sub_(grads[0]))
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
