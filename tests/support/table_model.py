"""A model that is a table, so that a test can compute its loss and gradient in a plain loop."""

from types import SimpleNamespace
from typing import Any

import torch

from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank


class Table(torch.nn.Module):
    """A model with one float64 log-probability per token id, 0 to 8. It is its own optimizer, which does not change the weights."""

    arch = SimpleNamespace(active_parameters=1000, layers=2, queries=8, sliding=())
    alignment, joins_beginnings = 1, False
    routing = None
    rank = Rank()

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-2.0, -0.5, 9, dtype=torch.float64))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table[batch.targets[batch.targets != IGNORE]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def set_lr(self, lr: float) -> None: ...
    def use(self) -> None: ...

    def step(self) -> float:
        return 0.0
