"""The records that become notices."""

import json
from typing import Any

import pytest

from polyreme.experience.run import RunState
from polyreme_trainer.observe.notices import NoticeRules
from support.record_lines import read_evaluation

RUN = ("letters-1", "letters", "/runs/letters")


def evaluation(version: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "eval", "version": version, "accuracy": accuracy, "time": 10.0 + version}


def test_a_new_best_is_better_than_all_before_it() -> None:
    rules = NoticeRules(*RUN)
    notices = rules.of_records([evaluation(0, 0.5), evaluation(8, 0.4), evaluation(16, 0.5), evaluation(24, 0.6)])
    [best] = notices
    assert best.payload() == {
        "event": "best",
        "run": "letters-1",
        "name": "letters",
        "run_dir": "/runs/letters",
        "time": 34.0,
        "text": "letters: accuracy 0.600 at version 24, the best so far (before: 0.500)",
        "version": 24,
        "metric": "accuracy",
        "value": 0.6,
    }
    assert json.loads(json.dumps(best.payload())) == best.payload()


def test_a_resumed_run_knows_its_best() -> None:
    rules = NoticeRules(*RUN, read_evaluation(evaluation(16, 0.6)), 0.7)
    assert rules.of_records([evaluation(24, 0.65)]) == []
    assert [notice.event for notice in rules.of_records([evaluation(32, 0.8)])] == ["best"]


def test_results_of_different_metrics_are_not_compared() -> None:
    rules = NoticeRules(*RUN, read_evaluation(evaluation(8, 0.7)), 0.7)
    hard = [
        evaluation(version, 0.9) | {"result": {"metric": "hard/pass@8", "value": value}}
        for version, value in ((16, 0.1), (24, 0.2))
    ]
    [best] = rules.of_records(hard)
    assert (best.payload()["version"], best.payload()["metric"]) == (24, "hard/pass@8")


def test_results_on_other_held_out_data_are_not_compared() -> None:
    rules = NoticeRules(*RUN, read_evaluation(evaluation(8, 0.2) | {"held_out": "a1"}), 0.2)
    other = [evaluation(version, value) | {"held_out": "b2"} for version, value in ((16, 0.7), (24, 0.8))]
    [best] = rules.of_records(other)
    assert (best.payload()["version"], best.text.endswith("(before: 0.700)")) == (24, True)


def test_a_stages_best_has_the_lowest_held_out_loss() -> None:
    held_out = [{"kind": "eval", "step": step, "loss": loss, "time": 1.0} for step, loss in ((0, 3.0), (2, 2.0), (4, 2.5))]
    [best] = NoticeRules(*RUN).of_records(held_out)
    assert best.text == "letters: held-out loss 2.000 after step 2, the best so far (before: 3.000)"
    assert best.facts == {"step": 2, "metric": "loss", "value": 2.0}
    assert NoticeRules(*RUN, None, 1.5).of_records(held_out) == []


def test_an_alarm_and_nothing_else() -> None:
    records = [
        {"kind": "iteration", "time": 1.0},
        {"kind": "alarm", "time": 2.0, "text": "no gradient"},
        {"kind": "notice", "time": 3.0},
    ]
    [alarm] = NoticeRules(*RUN).of_records(records)
    assert (alarm.event, alarm.time, alarm.text) == ("alarm", 2.0, "letters: alarm: no gradient")


@pytest.mark.parametrize(
    ("state", "event", "text"),
    [
        (RunState.DONE, "done", "letters is done"),
        (RunState.STOPPED, "stopped", "letters stopped: no disk"),
        (RunState.FAILED, "failed", "letters failed: no disk"),
    ],
)
def test_an_end_has_its_reason(state: RunState, event: str, text: str) -> None:
    notice = NoticeRules(*RUN).of_end(state, "no disk", 5.0)
    assert (notice.event, notice.text, notice.payload()["reason"]) == (event, text, "no disk")
