"""The name of an evaluation's mean, and its progress."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.config.evaluation import EvaluationSet
from polyreme.experience.metric_records import EvaluationProgress
from polyreme.experience.records import RewardPart
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.orchestrator.evaluation.answers import PROGRESS_SECONDS, EvaluationPace, HeldOutSet, ScoredAnswer
from polyreme_trainer.orchestrator.evaluation.evaluate import metric_name, part_means


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
    prompt = Prompt(np.array([1], np.int32), "2+2", "4", "{}", "2+2")

    def answer(**parts: float) -> ScoredAnswer:
        return ScoredAnswer(prompt, "4", 0.0, [RewardPart(name, raw, raw) for name, raw in parts.items()], 1, 1)

    means = part_means([answer(exact=1.0, shape=0.5), answer(exact=0.0), answer()])
    assert means == {"exact": 0.5, "shape": 0.5}


def test_the_digest_of_a_set_is_of_what_its_results_depend_on() -> None:
    def digest(label: str = "4", text: str = "2+2", samples: int = 5, name: str = "hard", **settings: Any) -> str:
        prompt = Prompt(np.array([1, 2], np.int32), f"<user>{text}", label, "{}", text)
        made = EvaluationSet(name=name, data=Path("eval.jsonl"), samples=samples, **settings)
        return HeldOutSet(made, [prompt, prompt]).digest

    assert (
        digest() == digest(samples=7) == digest(name="other") == digest(temperature=0.5)
    )  # one greedy answer has no temperature
    others = [
        digest(label="5"), digest(text="2+3"), digest(answers=2), digest(answers=2, temperature=0.5), digest(answers=2, pattern="x")
    ]  # fmt: skip
    assert len({digest(), *others}) == 6


def test_an_evaluation_reports_how_far_it_is_once_in_a_while() -> None:
    pace = EvaluationPace(version=3, asked=40)
    assert pace.add(2, 1000.0) is None  # after a long wait for an engine, which says nothing about the rest
    assert pace.add(4, 1001.0) is None
    record = pace.add(6, 1000.0 + PROGRESS_SECONDS)
    assert record == EvaluationProgress(version=3, answered=12, asked=40, seconds_left=2.8 * PROGRESS_SECONDS)
    assert pace.add(10, 1001.0 + PROGRESS_SECONDS) is None
