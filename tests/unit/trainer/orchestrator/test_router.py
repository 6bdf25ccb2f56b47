"""Routing: the fewest outstanding tokens among replicas with the version and capacity."""

import math

from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.router import FAILURE_BACKOFF, Target, choose

targets = st.lists(
    st.builds(
        Target,
        id=st.text("abc", min_size=1, max_size=4),
        version=st.none() | st.integers(0, 5),
        term=st.integers(1, 3),
        outstanding=st.integers(0, 50),
        sequences=st.integers(0, 6),
        backoff_until=st.floats(0, 20),
    ),
    unique_by=lambda target: target.id,
)


@given(
    *(targets, st.integers(0, 5), st.integers(1, 3), st.floats(0, 20), st.integers(1, 7) | st.just(math.inf)),
    st.sets(st.text("abc", min_size=1, max_size=4)),
)
def test_choice(there: list[Target], min_version: int, term: int, now: float, capacity: float, avoid: set[str]) -> None:
    usable = [
        t
        for t in there
        if t.version is not None
        and t.version >= min_version
        and t.term >= term
        and t.backoff_until <= now
        and t.sequences < capacity
    ]
    chosen = choose(there, min_version=min_version, term=term, now=now, capacity=capacity, avoid=avoid)
    assert (chosen is None) == (not usable)
    if chosen:
        assert chosen in usable
        rivals = [t for t in usable if t.id not in avoid] or usable
        assert chosen in rivals and chosen.outstanding == min(t.outstanding for t in rivals)
    assert chosen == choose(reversed(there), min_version=min_version, term=term, now=now, capacity=capacity, avoid=avoid)


def test_load_is_spread() -> None:
    there = [Target(str(i), version=0) for i in range(4)]
    for tokens in [100] * 8:
        chosen = choose(there, min_version=0, term=0, now=0.0, capacity=1)
        assert chosen is not None
        chosen.outstanding += tokens
    assert [t.outstanding for t in there] == [200] * 4


@given(st.integers(1, 1000), st.floats(0, 1, exclude_max=True))
def test_rests_grow_to_a_bound(failures: int, jitter: float) -> None:
    assert 0.25 <= FAILURE_BACKOFF.delay(failures, jitter) <= 12.0
    assert FAILURE_BACKOFF.delay(failures, jitter) <= FAILURE_BACKOFF.delay(failures + 1, jitter)
