"""The parts of the optimizer that need no ranks. tests/integration/test_layouts.py has its steps."""

import pytest
import torch

from polyreme_trainer.megatron.training.optimizer import sum_of_squares


@pytest.mark.parametrize(("tensors", "expected"), [([], 0.0), ([[3.0]], 9.0), ([[3.0], [0.0, -4.0]], 25.0)])
def test_squares_are_summed_over_all_tensors_also_over_none(tensors: list[list[float]], expected: float) -> None:
    """With adapters, all fragments of a rank may be parts of parameters that another rank counts."""
    found = sum_of_squares([torch.tensor(each) for each in tensors], torch.device("cpu"))
    assert found.shape == () and found.item() == pytest.approx(expected)
