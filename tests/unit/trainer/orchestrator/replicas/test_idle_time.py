"""IdleTime compared with a plain account of all calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.replicas.idle_time import IdleTime


def test_two_replicas_one_of_them_busy_for_half_the_time() -> None:
    idle_time = IdleTime(10.0)
    idle_time.joined("a", 10.0)
    idle_time.joined("b", 10.0)
    idle_time.began("a", 10.0)
    idle_time.began("a", 11.0)
    idle_time.ended("a", 12.0)
    idle_time.ended("a", 12.0)
    assert idle_time.take(14.0) == pytest.approx(3.0)  # b four seconds, a two
    assert idle_time.take(16.0) == pytest.approx(2.0)


def test_without_replicas_nobody_waits() -> None:
    assert IdleTime(0.0).take(5.0) == 0.0


steps = st.lists(
    st.tuples(st.sampled_from(["joined", "left", "began", "ended", "take"]), st.sampled_from("abc"), st.integers(0, 5)),
    max_size=50,
)


@given(steps)
def test_idleness_against_a_model(script: list[tuple[str, str, int]]) -> None:
    """The model counts every single second."""
    idle_time, now, since = IdleTime(0.0), 0, 0
    calls: dict[str, int] = {}
    seconds: list[tuple[int, int]] = []
    for step, replica, pause in script:
        seconds += [(len(calls), sum(not count for count in calls.values()))] * pause
        now += pause
        if step == "take":
            present, idle = sum(n for n, _ in seconds), sum(n for _, n in seconds)
            assert idle_time.take(now) == pytest.approx(idle / present * (now - since) if present else 0.0)
            since, seconds = now, []
            continue
        if step in ("began", "ended") and (replica not in calls or (step == "ended" and not calls[replica])):
            continue
        getattr(idle_time, step)(replica, now)
        if step == "joined":
            calls[replica] = 0
        elif step == "left":
            calls.pop(replica, None)
        else:
            calls[replica] += 1 if step == "began" else -1
