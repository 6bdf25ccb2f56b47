"""Supervised rows mixed into the policy's steps: their choice and their loss."""

import numpy as np
import pytest
import torch

from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.algorithms.mixing import ptx_loss, rows_of_step

SEED = (3, 9)


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (10, 10), (4, 11), (1, 2)])
def test_steps_go_through_pass_after_pass(rows: int, size: int) -> None:
    """Every pass has each row once, in its own order. A step may have rows of several passes."""
    found = np.concatenate([rows_of_step(rows, size, step, SEED) for step in range(12)])
    passes = [found[start : start + rows].tolist() for start in range(0, len(found) - rows + 1, rows)]
    assert all(sorted(each) == list(range(rows)) for each in passes)
    assert rows < 4 or len({tuple(each) for each in passes}) > 1


def test_a_step_follows_from_its_number() -> None:
    assert rows_of_step(10, 3, 7, SEED).tolist() == rows_of_step(10, 3, 7, SEED).tolist()
    assert rows_of_step(10, 3, 7, SEED).tolist() != rows_of_step(10, 3, 7, (4, 9)).tolist()


def test_value_gradient_and_metric_are_those_of_the_whole_step_however_it_is_cut() -> None:
    """Compares with a loop in float64, for several splits into micro-batches, including an empty one."""
    values = [-0.5, -2.0, -0.25, -1.0, -4.0, -0.125]
    expected = 0.3 * sum(-x for x in values) / len(values)
    for cut in ([6], [2, 4], [1, 0, 5], [1] * 6):
        parts = [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in np.split(values, np.cumsum(cut)[:-1])]
        losses, metrics = zip(*(ptx_loss(part, len(values), 0.3) for part in parts), strict=True)
        total = torch.stack(losses).sum()
        total.backward()
        assert total.item() == pytest.approx(expected, rel=1e-12)
        gradients = [part.grad for part in parts if part.grad is not None]
        assert torch.cat(gradients).tolist() == pytest.approx([-0.3 / 6] * 6, rel=1e-12)
        assert finish(combine(metrics)) == {"ptx_loss": pytest.approx(expected / 0.3)}


def test_by_hand() -> None:
    """Tokens of probability 1/2 and 1/8 have cross entropies of ln 2 and 3 ln 2, mean 2 ln 2."""
    loss, _ = ptx_loss(torch.log(torch.tensor([0.5, 0.125], dtype=torch.float64)), 2, coef=10.0)
    assert loss.item() == pytest.approx(20 * np.log(2))


def test_rows_without_a_response_have_no_loss() -> None:
    assert ptx_loss(torch.zeros(0), 0, 1.0)[0] == 0
