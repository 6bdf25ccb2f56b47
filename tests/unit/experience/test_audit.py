"""The audit detects every kind of damage."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from polyreme.experience.audit import LogSnapshot


def whole() -> LogSnapshot:
    """Groups 0, 1 released; 2 dropped; 3, 4 planned; 5 failed; 6 appended; 7 admitted."""
    return LogSnapshot(
        run_id="r",
        meta={"state": "running", "version": "2", "base": "0", "released": "1", "low_water": "3", "groups_per_iteration": "2"},
        rows={
            index: row.split(" ")
            for index, row in enumerate(
                [
                    *("planned 1 0 1", "planned 2 0 1", "dropped 1 1.0 equal", "planned 1 1 2", "planned 1 1 2"),
                    *("failed 3 reward raised", "appended 1 2 0.5", "admitted 1 2 1700000000000"),
                ]
            )
        },
        plans={1: [0, 1], 2: [3, 4]},
        payloads={3, 4, 6},
        in_flight={7: 2},
        appended={6: 2},
        partial_rollouts={"7": "1 2", "7:0": "", "7:1": ""},
    )


def test_an_intact_log_is_clean() -> None:
    audit = whole().audit()
    assert audit.clean
    assert audit.counts == {"admitted": 1, "appended": 1, "planned": 2, "released": 2, "dropped": 1, "failed": 1}


DAMAGE: dict[str, tuple[Callable[[LogSnapshot], object], str, Any]] = {
    "a row is gone": (lambda s: s.rows.pop(2), "missing", [2]),
    "a plan twice": (lambda s: s.plans[2].append(0), "double", [0]),
    "a needed payload is gone": (lambda s: s.payloads.remove(4), "lost", [4]),
    "an appended payload is gone": (lambda s: s.payloads.remove(6), "lost", [6]),
    "a payload of a released group": (lambda s: s.payloads.add(1), "leftover", [1]),
    "a payload of an unknown group": (lambda s: s.payloads.add(99), "leftover", [99]),
    "not queued": (lambda s: s.appended.clear(), "contradictions", ["group 6"]),
    "queued twice": (lambda s: s.in_flight.update({6: 2}), "contradictions", ["group 6 is queued as admitted"]),
    "queued wrongly": (lambda s: s.in_flight.update({7: 1}), "contradictions", ["group 7 is admitted"]),
    "a row with another plan": (
        lambda s: s.rows.update({3: ["planned", "1", "1", "1"]}),
        "contradictions",
        ["group 3 is in plan 2"],
    ),
    "a partial rollout of an appended group": (
        lambda s: s.partial_rollouts.update({"6": "1 0"}),
        "contradictions",
        ["group 6 has a partial rollout"],
    ),
    "a partial rollout of an earlier attempt": (
        lambda s: s.rows.update({7: ["admitted", "2", "2", "1"]}),
        "contradictions",
        ["group 7 has a partial rollout of attempt 1"],
    ),
    "a partial rollout with a missing part": (
        lambda s: s.partial_rollouts.pop("7:0"),
        "contradictions",
        ["group 7 has a partial rollout"],
    ),
    "parts without a partial rollout": (lambda s: s.partial_rollouts.pop("7"), "contradictions", ["part 7:0", "part 7:1"]),
    "below the low water": (lambda s: s.meta.update(low_water="4"), "contradictions", ["group 3 is planned"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_detected(name: str) -> None:
    damage, where, expected = DAMAGE[name]
    snapshot = copy.deepcopy(whole())
    damage(snapshot)
    audit = snapshot.audit()
    assert not audit.clean
    found = getattr(audit, where)
    if where == "contradictions":
        assert all(any(text.startswith(start) for text in found) for start in expected)
    else:
        assert found == expected


def test_a_lost_plan_is_detected() -> None:
    snapshot = whole()
    del snapshot.plans[1]
    contradictions = snapshot.audit().contradictions
    assert any(text.startswith("group 0 is in plan None") for text in contradictions)
    assert any(text.startswith("plans are not consecutive") for text in contradictions)
