"""What an evaluation's mean is called."""

from typing import Any

import pytest

from polyreme.api.v1 import reward_pb2
from polyreme.config.reward import RewardConfig
from polyreme_reward.rules import BUILTINS
from polyreme_trainer.orchestrator.evaluate import _JUDGES, metric_name, part_means


@pytest.mark.parametrize(
    ("rewards", "scores", "name"),
    [
        ([{"name": "exact"}], [0.0, 1.0], "accuracy"),
        ([{"name": "exact", "options": {"after": "#"}}], [1.0], "accuracy"),
        ([{"name": "exact", "weight": 1.3}], [0.0, 1.3], "score"),
        ([{"name": "exact"}, {"name": "length", "weight": 0.1}], [0.0, 1.0], "score"),
        ([{"name": "length"}], [0.0, 1.0], "score"),
        ([{"name": "code"}], [0.0, 1.0], "accuracy"),
        ([{"name": "code", "options": {"partial": True}}], [0.0, 0.0], "score"),
        ([{"name": "exact", "file": "rewards.py"}], [0.0, 1.0], "score"),
    ],
)
def test_only_the_share_of_right_answers_is_an_accuracy(rewards: list[dict[str, Any]], scores: list[float], name: str) -> None:
    assert metric_name(RewardConfig.model_validate({"rewards": rewards}), scores) == name


def test_parts_have_the_mean_of_the_answers_that_have_them() -> None:
    def result(**parts: float) -> reward_pb2.ScoreResult:
        result = reward_pb2.ScoreResult()
        for name, raw in parts.items():
            result.parts.add(name=name, raw=raw)
        return result

    means = part_means([result(exact=1.0, shape=0.5), result(exact=0.0), result()])
    assert means == {"exact": 0.5, "shape": 0.5}


def test_the_judges_are_built_in() -> None:
    assert _JUDGES.keys() <= BUILTINS.keys()
