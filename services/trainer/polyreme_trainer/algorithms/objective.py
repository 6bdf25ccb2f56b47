"""The inputs and the result of a stage's loss for one micro-batch.

Invariant: a row is never split between micro-batches, and the divisor of a loss comes from the whole optimizer step. So the sum
of its values over micro-batches and ranks does not depend on how the step is split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from polyreme_trainer.algorithms.inputs import PerSequence
from polyreme_trainer.algorithms.metrics import Metrics

Head = Literal["language", "value"]
"""The output of the trained model: log-probabilities of tokens, or one score per sequence."""


@dataclass(frozen=True)
class StageInputs(PerSequence):
    """r rows of one or two sequences each, with t output numbers of the model in total.

    Attributes:
        output: [t], log-probabilities of the trained tokens, or with a value head each sequence's score; carries the gradient.
        sequence: int64 [t], the index of each number's sequence within the micro-batch.
        sequences: the number of sequences. Of two sequences in a row, the first is the chosen one.
        columns: name -> float32 [r].
        rows, tokens: number of rows and of trained tokens of the whole optimizer step.
        reference: [t], log-probabilities under the reference.
        baseline: KTO's estimate of the KL to the reference, for the whole step.
    """

    output: Tensor
    sequence: Tensor
    sequences: int
    columns: Mapping[str, Tensor]
    rows: int
    tokens: int
    reference: Tensor | None = None
    baseline: float = 0.0

    def log_ratios(self) -> Tensor:
        """`log p - log p_ref` of each trained token, [t]. Raises ValueError without a reference."""
        if self.reference is None:
            raise ValueError("the loss needs a reference")
        return self.output - self.reference


class Objective(Protocol):
    """A stage's loss.

    Attributes:
        head: head of the trained model.
        needs_reference: whether it needs `StageInputs.reference`.
        needs_baseline: whether `StageInputs.baseline` is measured before the step.
    """

    @property
    def head(self) -> Head: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def needs_baseline(self) -> bool: ...

    def loss(self, inputs: StageInputs) -> tuple[Tensor, Metrics]:
        """Returns a micro-batch's addend of the step's loss, and its metrics."""
