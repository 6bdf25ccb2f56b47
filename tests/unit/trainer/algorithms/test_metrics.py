"""Metrics of parts add up to those of the whole."""

import torch

from polyreme_trainer.algorithms.metrics import combine, finish, maximum_of, mean_of


def test_parts_add_up_to_the_whole() -> None:
    x, weight = torch.arange(10.0), torch.arange(10.0) % 3
    parts = [
        {"mean": mean_of(p), "flag": mean_of(p > 3), "weighted": mean_of(p, w), "largest_max": maximum_of(p)}
        for p, w in zip(x.split([4, 5, 1, 0]), weight.split([4, 5, 1, 0]), strict=True)
    ]
    assert finish(combine(parts)) == {"mean": 4.5, "flag": 0.6, "weighted": 42 / 9, "largest_max": 9.0}


def test_the_smallest_of_parts() -> None:
    assert finish(combine([{"x_min": (3.0, 1.0)}, {"x_min": (-1.0, 1.0)}, {"x_min": (2.0, 1.0)}])) == {"x_min": -1.0}


def test_a_metric_of_nothing_is_left_out() -> None:
    assert finish(combine([{"mean": mean_of(torch.zeros(0))}])) == {}


def test_metrics_carry_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not any(part.requires_grad for part in (*mean_of(x), *maximum_of(x)))
