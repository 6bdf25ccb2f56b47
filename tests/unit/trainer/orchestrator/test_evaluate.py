"""What an evaluation's mean is called."""

import pytest

from polyreme_trainer.orchestrator.evaluate import metric_name


@pytest.mark.parametrize(
    ("correctness", "scores", "name"),
    [
        (True, [0.0, 1.0], "accuracy"),
        (True, [1.0], "accuracy"),
        (True, [0.0, 1.3], "score"),  # weighted
        (False, [0.0, 1.0], "score"),
    ],
)
def test_only_the_share_of_right_answers_is_an_accuracy(correctness: bool, scores: list[float], name: str) -> None:
    assert metric_name(correctness, scores) == name
