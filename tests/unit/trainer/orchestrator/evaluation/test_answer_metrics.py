"""Metrics of several answers to each prompt, compared with their definitions."""

import itertools

import pytest

from polyreme_trainer.orchestrator.evaluation.answer_metrics import answer_metrics, answer_of, majority, pass_at


@pytest.mark.parametrize(("answers", "right", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 4), (6, 6, 2), (8, 3, 8), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(answers: int, right: int, k: int) -> None:
    outcomes = [position < right for position in range(answers)]
    choices = [any(choice) for choice in itertools.combinations(outcomes, k)]
    assert pass_at(answers, right, k) == pytest.approx(sum(choices) / len(choices))


def test_the_metrics_of_two_prompts() -> None:
    scores = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    texts = [["4", "5", "5"], ["7", " 7 ", "8"]]
    found = answer_metrics(scores, texts, True, None)
    assert found == pytest.approx(
        {"mean@3": 0.5, "best@3": 1.0, "majority@3": 0.5, "pass@1": 0.5, "pass@2": (2 / 3 + 1) / 2, "pass@3": 1.0}
    )
    assert found["pass@1"] == pytest.approx(found["mean@3"])


def test_a_score_that_is_not_right_or_wrong_has_no_pass_rate() -> None:
    assert answer_metrics([[0.5, 2.0]], [["a", "b"]], False, None) == {"mean@2": 1.25, "best@2": 2.0, "majority@2": 0.5}


def test_one_answer_has_no_further_metrics() -> None:
    assert answer_metrics([[1.0], [0.0]], [["a"], ["b"]], True, None) == {}
    assert answer_metrics([], [], True, None) == {}


def test_the_majority_votes_by_the_answer_in_the_response() -> None:
    texts = ["I think #4", "because #5", "so it is #4", "no answer"]
    assert majority([1.0, 0.0, 1.0, 0.0], texts, r"#(\d)") == 1.0
    assert majority([0.0, 1.0], ["#1", "#2"], r"#(\d)") == 0.0  # a tie: the first one counts
    assert majority([0.25, 0.75], ["none", "nothing"], r"#(\d)") == 0.5


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [(" 4 \n", None, "4"), ("#1 then #2", r"#(\d)", "2"), ("1 then 2", r"\d", "2"), ("", r"\d", None)],
)
def test_the_answer_is_the_last_match(text: str, pattern: str | None, answer: str | None) -> None:
    assert answer_of(text, pattern) == answer
