"""The inputs of a loss: the trained tokens of one micro-batch in flat arrays, independent of padding and packing.

A sequence is a trajectory. It has only the tokens that the policy sampled and that are trained on, those of all its turns.
Micro-batches may split an episode, so what is computed per sequence, such as GSPO's ratio, is per trajectory.

Invariant: a sequence is never split between micro-batches, so sums over a sequence are complete.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class PerSequence:
    """Sums over the sequences of a micro-batch, whose t numbers belong to `sequences` sequences: `sequence` is int64 [t]."""

    sequence: Tensor
    sequences: int

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of x [t] over each sequence, [sequences]; differentiable."""
        return torch.zeros(self.sequences, dtype=x.dtype, device=x.device).index_add(0, self.sequence, x)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of x [t] over each sequence, [sequences]; 0 for a sequence without tokens; differentiable."""
        return self.sequence_sum(x) / self.sequence_sum(torch.ones_like(x)).clamp(min=1)


@dataclass(frozen=True)
class LossInputs(PerSequence):
    """t trained tokens of some sequences. All floating-point tensors have one dtype; only those marked so carry a gradient.

    Attributes:
        logprobs: [t], log-probabilities of the tokens under the trained policy; carries the gradient.
        old: [t], under the policy before the iteration's first optimizer step; `logprobs.detach()` when there is one step.
        behaviour: [t], under the policy that sampled each token.
        advantages: [t].
        weight: [t], each token's coefficient in the step's loss, computed over the global step: the loss is `sum(weight * x)`.
        sequence: int64 [t], index of the token's sequence within the micro-batch.
        sequences: the number of sequences in the micro-batch.
        reference: [t], under the reference policy.
        entropy: [t], the policy's entropy at each token, in nats; carries the gradient.
        fresh: bool [t], whether the policy before the step sampled the token's whole sequence; None when unknown.
    """

    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    advantages: Tensor
    weight: Tensor
    sequence: Tensor
    sequences: int
    reference: Tensor | None = None
    entropy: Tensor | None = None
    fresh: Tensor | None = None
