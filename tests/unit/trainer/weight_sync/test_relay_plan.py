"""The source of a version for each replica."""

import pytest

from polyreme.weights.wire import MAX_FETCHES
from polyreme_trainer.weight_sync.relay_plan import FORGET_SECONDS, MAX_UNFINISHED, Content, RelayPlan

ONE, TWO = Content(1), Content(2)


def chain(plan: RelayPlan, count: int, content: Content = ONE) -> list[str | None]:
    return [plan.assign(f"r{number:04}", content, 0.0) for number in range(count)]


def test_replicas_form_a_chain_that_the_trainer_feeds() -> None:
    plan = RelayPlan(1)
    assert chain(plan, 4) == [None, "r0000", "r0001", "r0002"]
    assert [plan.hops(f"r{number:04}") for number in range(4)] == [1, 2, 3, 4]


def test_the_trainer_feeds_as_many_as_agreed() -> None:
    assert chain(RelayPlan(2), 4) == [None, None, "r0000", "r0001"]
    assert chain(RelayPlan(100), 4) == [None] * 4


@pytest.mark.parametrize("count", [16, 200])
def test_no_replica_waits_for_too_many_others_or_serves_too_many(count: int) -> None:
    sources = chain(RelayPlan(1), count)
    assert sources.count(None) == 1
    assert max(sources.count(source) for source in {*sources} - {None}) <= (1 if count == 16 else MAX_FETCHES)
    unfinished: dict[str | None, int] = {None: 0}
    for number, source in enumerate(sources):
        unfinished[f"r{number:04}"] = unfinished[source] + 1
    assert max(unfinished.values()) == min(count, MAX_UNFINISHED + 1)


def test_a_late_joiner_asks_the_idlest_replica_that_has_finished() -> None:
    plan = RelayPlan(1)
    chain(plan, 3)
    for name in ("r0000", "r0001", "r0002"):
        plan.completed(name)
    assert [plan.assign(name, ONE, 0.0) for name in ("x", "y", "z")] == ["r0000", "r0001", "r0002"]


def test_a_version_and_its_deltas_are_sent_apart_and_who_applied_a_delta_has_the_version() -> None:
    plan = RelayPlan(1)
    delta = Content(2, base=1)
    assert [plan.assign(name, delta, 0.0) for name in ("a", "b")] == [None, "a"]
    assert plan.assign("late", TWO, 0.0) is None
    plan.completed("b")
    assert plan.assign("later", TWO, 0.0) == "b"
    assert plan.assign("behind", Content(2, base=0), 0.0) is None


def test_a_replica_that_holds_an_older_version_is_no_source() -> None:
    plan = RelayPlan(1)
    chain(plan, 2)
    plan.completed("r0000")
    assert plan.assign("r0000", TWO, 0.0) is None
    assert plan.assign("r0001", TWO, 0.0) == "r0000"


def test_a_replica_whose_source_failed_does_not_fetch_from_those_that_wait_for_it() -> None:
    plan = RelayPlan(1)
    chain(plan, 4)
    plan.failed("r0001", "r0000", 0.0)
    assert plan.assign("r0001", ONE, 0.0) is None
    plan.completed("r0001")
    assert plan.assign("r0002", ONE, 0.0) == "r0001"


def test_a_source_that_failed_one_replica_is_still_asked_by_others_and_after_two_by_none() -> None:
    plan = RelayPlan(1)
    assert plan.assign("a", ONE, 0.0) is None
    plan.completed("a")
    for name in ("b", "c"):
        assert plan.assign(name, ONE, 0.0) == "a"
        plan.failed(name, "a", 0.0)
        plan.forget(name)
    assert plan.assign("d", ONE, 1.0) is None
    plan.forget("d")
    assert plan.assign("d", ONE, FORGET_SECONDS) == "a"


def test_a_replica_that_failed_with_two_sources_receives_from_the_trainer() -> None:
    plan = RelayPlan(1)
    chain(plan, 3)
    for name in ("r0000", "r0001", "r0002"):
        plan.completed(name)
    for source in ("r0000", "r0001"):
        assert plan.assign("far", ONE, 0.0) == source
        plan.failed("far", source, 0.0)
    assert plan.assign("far", ONE, 0.0) is None


def test_a_replica_that_left_or_lost_its_bytes_is_not_asked() -> None:
    plan = RelayPlan(1)
    chain(plan, 2)
    for name in ("r0000", "r0001"):
        plan.completed(name)
    plan.missing("r0000", Content(0))
    assert plan.assign("x", ONE, 0.0) == "r0000"
    plan.missing("r0000", ONE)
    plan.drop("r0001")
    plan.forget("x")
    plan.completed("r0001")
    assert plan.assign("x", ONE, 0.0) is None


def test_a_replica_without_a_delta_is_still_asked_for_what_it_received_since() -> None:
    plan = RelayPlan(1)
    assert plan.assign("a", Content(2, base=1), 0.0) is None
    assert plan.assign("a", TWO, 0.0) is None  # it refused the delta
    plan.missing("a", Content(2, base=1))
    assert plan.assign("b", TWO, 0.0) == "a"


def test_who_applied_a_delta_and_lost_the_version_is_not_asked_again() -> None:
    plan = RelayPlan(1)
    plan.assign("a", Content(2, base=1), 0.0)
    plan.completed("a")
    assert plan.assign("b", TWO, 0.0) == "a"
    plan.missing("a", TWO)
    assert plan.assign("b", TWO, 0.0) is None


def test_a_full_source_is_passed_over_once() -> None:
    plan = RelayPlan(1)
    chain(plan, 1)
    plan.completed("r0000")
    assert plan.assign("x", ONE, 0.0, full={"r0000"}) is None
    assert plan.assign("y", ONE, 0.0) == "r0000"
