"""What an evaluation's mean is called."""

import pytest

from polyreme.api.v1 import reward_pb2
from polyreme_trainer.orchestrator.evaluate import metric_name, part_means


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


def test_parts_have_the_mean_of_the_answers_that_have_them() -> None:
    def result(**parts: float) -> reward_pb2.ScoreResult:
        result = reward_pb2.ScoreResult()
        for name, raw in parts.items():
            result.parts.add(name=name, raw=raw)
        return result

    means = part_means([result(exact=1.0, shape=0.5), result(exact=0.0), result()])
    assert means == {"exact": 0.5, "shape": 0.5}
