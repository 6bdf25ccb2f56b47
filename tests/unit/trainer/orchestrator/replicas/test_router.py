"""Routing: the fewest outstanding tokens among replicas with the version and capacity."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.replicas.router import FAILURE_BACKOFF, Candidates, Target, fair_share

targets = st.lists(
    st.builds(
        Target,
        id=st.text("abc", min_size=1, max_size=4),
        version=st.none() | st.integers(0, 5),
        staged=st.none() | st.integers(6, 7),
        term=st.integers(1, 3),
        outstanding=st.integers(0, 50),
        sequences=st.integers(0, 6),
        backoff_until=st.floats(0, 20),
    ),
    unique_by=lambda target: target.id,
)


@given(
    *(targets, st.integers(0, 7), st.integers(1, 3), st.floats(0, 20), st.integers(1, 7) | st.just(math.inf)),
    st.sets(st.text("abc", min_size=1, max_size=4)),
)
def test_choice(there: list[Target], min_version: int, term: int, now: float, capacity: float, avoid: set[str]) -> None:
    usable = [
        t
        for t in there
        if (t.version is not None or t.staged is not None)
        and max(t.version or 0, t.staged or 0) >= min_version
        and t.term >= term
        and t.backoff_until <= now
        and t.sequences < capacity
    ]
    asked: dict[str, Any] = {"min_version": min_version, "term": term, "now": now, "capacity": capacity}
    chosen = Candidates(there, **asked).take(avoid)
    assert (chosen is None) == (not usable)
    if chosen:
        assert chosen in usable
        rivals = [t for t in usable if t.id not in avoid] or usable
        assert chosen in rivals and chosen.outstanding == min(t.outstanding for t in rivals)
    assert chosen == Candidates(reversed(there), **asked).take(avoid)


@given(
    targets,
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4), st.sets(st.text("abc", min_size=1, max_size=2)))),
)
def test_calls_in_a_row_go_where_each_alone_would_go(
    there: list[Target], capacity: int, calls: list[tuple[int, int, set[str]]]
) -> None:
    asked: dict[str, Any] = {"min_version": 0, "term": 1, "now": 10.0, "capacity": capacity}
    candidates = Candidates(there, **asked)
    for tokens, sequences, avoid in calls:
        chosen = candidates.take(avoid)
        assert chosen is Candidates(there, **asked).take(avoid)
        if chosen is None:
            break
        chosen.outstanding += tokens
        chosen.sequences += sequences


def test_load_is_spread() -> None:
    there = [Target(str(i), version=0) for i in range(4)]
    for tokens in [100] * 8:
        chosen = Candidates(there, min_version=0, term=0, now=0.0, capacity=1).take()
        assert chosen is not None
        chosen.outstanding += tokens
    assert [t.outstanding for t in there] == [200] * 4


def test_the_first_replica_with_a_version_gets_its_share_only() -> None:
    first, second = Target("a", version=3, term=1), Target("b", version=2, term=1, sequences=5)
    assert fair_share([first, second], min_version=3, term=1, now=0.0, waiting=64) == 32
    first.sequences = 32
    assert fair_share([first, second], min_version=3, term=1, now=0.0, waiting=32) == 32
    second.version = 3
    assert fair_share([first, second], min_version=3, term=1, now=0.0, waiting=32) == math.inf


@pytest.mark.parametrize(
    "other",
    [
        Target("b", version=1, term=1),
        Target("b"),
        Target("b", version=2, term=1, backoff_until=1.0),
        Target("b", version=2, term=1, suspended_until=1.0),
        Target("b", version=3, term=1),
        Target("b", version=2, term=1, staged=3),
    ],
    ids=["far behind", "just joined", "failing", "suspended", "serving", "staged"],
)
def test_nothing_is_kept_for_a_replica_that_may_not_come(other: Target) -> None:
    first = Target("a", version=3, term=1)
    assert fair_share([first, other], min_version=3, term=1, now=0.0, waiting=64) == math.inf


def test_before_the_first_version_every_replica_is_about_to_serve_it() -> None:
    there = [Target("a", version=0, term=1), Target("b"), Target("c")]
    assert fair_share(there, min_version=0, term=1, now=0.0, waiting=64) == 22


@given(targets, st.integers(0, 5), st.integers(1, 3), st.floats(0, 20), st.integers(1, 60))
def test_shares_hold_all_samples(there: list[Target], min_version: int, term: int, now: float, waiting: int) -> None:
    """What waits fits into the shares of those that serve the version and those that are about to."""
    share = fair_share(there, min_version=min_version, term=term, now=now, waiting=waiting)
    newest = {t.id: max(-1 if t.version is None else t.version, -1 if t.staged is None else t.staged) for t in there}
    able = [t for t in there if t.available_at() <= now and newest[t.id] >= min_version - 1]
    if share != math.inf:
        assert 1 <= share <= waiting + sum(target.sequences for target in there)
        assert share * len(able) >= waiting


@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True))
def test_rests_grow_to_a_bound(failures: int, jitter: float) -> None:
    assert 0.25 <= FAILURE_BACKOFF.delay(failures, jitter) <= 12.0
    assert FAILURE_BACKOFF.delay(failures, jitter) <= FAILURE_BACKOFF.delay(failures + 1, jitter)


def test_the_preferred_replica_is_taken_while_it_has_room() -> None:
    there = [Target("a", version=1), Target("b", version=1, outstanding=40, sequences=2)]

    def chosen(prefer: str | None, capacity: float = math.inf, avoid: frozenset[str] = frozenset()) -> str:
        target = Candidates(there, min_version=1, term=0, now=0.0, capacity=capacity).take(avoid, prefer)
        return target.id if target else ""

    assert (chosen(None), chosen("b"), chosen("b", capacity=2), chosen("gone")) == ("a", "b", "a", "a")
    assert chosen("b", avoid=frozenset("b")) == "a"
