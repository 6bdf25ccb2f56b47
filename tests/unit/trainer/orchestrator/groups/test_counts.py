"""What several orchestrators count becomes the metrics of one iteration."""

import json

import pytest

from polyreme_trainer.orchestrator.groups.counts import OrchestratorWork, metrics_of

OWN = OrchestratorWork(3, 2.0, 10.0, {"rollout/dropped_groups": (1.0, 0), "rollout/mean_score": (2.0, 4)})
OTHER = OrchestratorWork(5, 1.0, 20.0, {"rollout/dropped_groups": (2.0, 0), "rollout/mean_score": (6.0, 6)})


def test_sums_are_added_and_means_weighted() -> None:
    assert metrics_of(OWN, [OTHER]) == {
        "time/rollout_wait": pytest.approx(0.5),  # the other one left replicas without a call for a twentieth of its time
        "rollout/dropped_groups": 3.0,
        "rollout/mean_score": pytest.approx(0.8),
    }


def test_the_metrics_of_one_are_its_own() -> None:
    assert metrics_of(OWN, []) == {"time/rollout_wait": 2.0, "rollout/dropped_groups": 1.0, "rollout/mean_score": 0.5}
    assert metrics_of(OWN, [OrchestratorWork()]) == metrics_of(OWN, []), "one that has not begun keeps no replica busy"


def test_what_was_done_since_a_report_is_the_difference() -> None:
    later = OWN + OTHER
    assert later + -OWN == OTHER
    assert OrchestratorWork.parse(json.loads(json.dumps(later.line()))) == later
