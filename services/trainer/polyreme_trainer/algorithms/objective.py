"""What the loss of a stage sees of one micro-batch, and what it gives.

Invariant: a row is never cut between micro-batches, and what a loss divides by comes from the whole optimizer step; so the sum of its
values over micro-batches and ranks does not depend on how the step is cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from polyreme_trainer.algorithms.metrics import Metrics

Head = Literal["language", "value"]
"""What the trained model ends in: log-probabilities of tokens, or one score per sequence."""


@dataclass(frozen=True)
class StageInputs:
    """r rows of one or two sequences each, t numbers of the model's in all.

    Attributes:
        output: [t], log-probabilities of the trained tokens, or with a value head the score of each sequence; carries the gradient.
        sequence: int64 [t], which of the micro-batch's sequences each number is of.
        sequences: how many there are. Of two sequences in a row the first is the chosen one.
        columns: name -> float32 [r].
        rows, tokens: of the whole optimizer step; `tokens` counts the trained ones.
        reference: [t], log-probabilities under the reference.
        baseline: KTO's estimate of the KL to the reference, of the whole step.
    """

    output: Tensor
    sequence: Tensor
    sequences: int
    columns: Mapping[str, Tensor]
    rows: int
    tokens: int
    reference: Tensor | None = None
    baseline: float = 0.0

    def sums(self, x: Tensor) -> Tensor:
        """The sum of x [t] over each sequence, [sequences]; differentiable."""
        return torch.zeros(self.sequences, dtype=x.dtype, device=x.device).index_add(0, self.sequence, x)

    def means(self, x: Tensor) -> Tensor:
        """The mean of x [t] over each sequence, [sequences]; 0 for one without trained tokens; differentiable."""
        return self.sums(x) / self.sums(torch.ones_like(x)).clamp(min=1)

    def log_ratios(self) -> Tensor:
        """`log p - log p_ref` of each trained token, [t]. Raises ValueError where there is no reference."""
        if self.reference is None:
            raise ValueError("the loss needs a reference")
        return self.output - self.reference


class Objective(Protocol):
    """A stage's loss.

    Attributes:
        head: of the model that it trains.
        needs_reference: whether `StageInputs.reference` is there.
        needs_baseline: whether `StageInputs.baseline` is measured before the step.
    """

    @property
    def head(self) -> Head: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def needs_baseline(self) -> bool: ...

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        """A micro-batch's part of the step's loss, to be added up, and its metrics."""
        ...
