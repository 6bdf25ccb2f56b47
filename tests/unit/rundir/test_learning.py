"""Whether a run has learned: no false alarm, and the cause where a metric shows it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyreme.experience.metric_records import Evaluation
from polyreme.rundir.learning import Learning, learning_lines

FLAT: dict[str, Any] = {
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "actor/lr": 1e-3,
    "grad_norm": 0.2,
    "stop/length_fraction": 0.1,
    "zero_variance_group_fraction": 0.5,
}


def learned(rewards: Callable[[int], float], iterations: int = 60, **fields: Any) -> Learning:
    found = Learning()
    for number in range(iterations):
        found.add({"reward/mean": rewards(number), **FLAT, **fields})
    return found


def noise(level: float, seed: int = 0) -> Callable[[int], float]:
    draws = np.random.default_rng(seed).normal(level, 0.05, 1000)
    return lambda number: float(draws[number])


def test_a_run_whose_rewards_or_evaluations_rise_has_learned() -> None:
    rising = noise(0.0)
    assert learned(lambda number: 0.2 + 0.005 * number + rising(number)).findings({}, None) == []
    evaluation = Evaluation(version=60, samples=500)
    assert learned(noise(0.3)).findings({0: 0.30, 60: 0.45}, evaluation) == []
    assert learned(noise(0.3)).findings({0: 0.30, 60: 0.32}, evaluation) != []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_learning(seed: int) -> None:
    head, *causes = learned(noise(0.04, seed)).findings({0: 0.043, 60: 0.039}, Evaluation(version=60, samples=64)) or ["", ""]
    if head:  # two standard errors: one seed in twenty may look like learning
        assert "nothing was learned" in head and "0.043 and 0.039" in head and "no cause is visible" in causes[0]


def test_most_seeds_of_noise_are_told_apart_from_learning() -> None:
    told = [bool(learned(noise(0.04, seed)).findings({}, None)) for seed in range(20)]
    assert sum(told) >= 17


@pytest.mark.parametrize(
    ("fields", "labels", "cause"),
    [
        ({"actor/lr": 0.0}, ["1"], "learning rate was 0"),
        ({"critic/score/max": 0.0}, ["1"], "every answer scored 0"),
        ({"zero_variance_group_fraction": 0.97}, ["1"], "97% of the groups"),
        ({"stop/length_fraction": 0.8}, ["1"], "80% of the answers were cut at rollout.max_new_tokens"),
        ({}, ["", ""], "labels of the held-out prompts are empty"),
        ({"grad_norm": 0.0}, ["1"], "gradient was 0"),
    ],
)
def test_a_cause_that_the_records_show_is_named(fields: dict[str, Any], labels: list[str], cause: str) -> None:
    newest = Evaluation(version=60, samples=64, examples=[{"label": label} for label in labels])
    head, *causes = learned(lambda number: 0.1, **fields).findings({0: 0.1, 60: 0.1}, newest)
    assert len(causes) == 1 and cause in causes[0]
    assert learning_lines([head, *causes])[0].startswith("warning ")


def test_nothing_is_claimed_too_early_or_about_a_distillation() -> None:
    assert learned(lambda number: 0.1, iterations=9).findings({}, None) == []
    teacher: dict[str, Any] = {"actor/teacher_kl": 0.1}
    assert learned(lambda number: 0.0, **teacher).findings({}, None) == []
