"""The choice of a replica for a request."""

from polyreme.gateway.names import VersionBounds
from polyreme.gateway.replicas import ServedReplica, choose


def replica(id: str, version: int | None, outstanding: int = 0, load: int = 0, chosen: int = 0) -> ServedReplica:
    return ServedReplica(id, f"{id}:1", version=version, outstanding=outstanding, load=load, chosen=chosen)


def found(*replicas: ServedReplica, **asked: object) -> str | None:
    chosen = choose(replicas, **{"wanted": "any", **asked})  # type: ignore[arg-type]
    return chosen.id if chosen else None


def test_the_least_loaded_replica_by_its_run_and_this_gateway() -> None:
    assert found(replica("a", 1, outstanding=2), replica("b", 1, load=3), replica("c", 1, outstanding=1)) == "c"
    assert found(replica("a", 1, outstanding=2, load=1), replica("b", 1, load=2)) == "b"


def test_equal_replicas_take_turns() -> None:
    assert found(replica("a", 1, chosen=5), replica("b", 1, chosen=4)) == "b"


def test_a_version_is_asked_of_those_that_serve_it() -> None:
    both = replica("a", 1), replica("b", 2, load=9)
    assert found(*both, wanted=2) == "b"
    assert found(*both, wanted=1) == "a"
    assert found(*both, wanted=3) is None


def test_the_latest_version_is_the_newest_of_those_left() -> None:
    both = replica("a", 1), replica("b", 2, load=9)
    assert found(*both, wanted="latest") == "b"
    assert found(*both, wanted="latest", tried={"b"}) == "a"
    assert found(wanted="latest") is None


def test_headers_bound_the_version() -> None:
    three = replica("a", 1), replica("b", 2, load=9), replica("c", 3, load=99)
    assert found(*three, bounds=VersionBounds(minimum=2)) == "b"
    assert found(*three, bounds=VersionBounds(exact=3)) == "c"
    assert found(*three, bounds=VersionBounds(minimum=0)) == "a"
    assert found(*three, bounds=VersionBounds(minimum=4)) is None
    assert found(*three, bounds=VersionBounds(exact=3), wanted=2) is None
    assert found(*three, bounds=VersionBounds(exact=2), wanted="latest") == "b"


def test_a_replica_without_a_version_or_already_tried_is_no_choice() -> None:
    assert found(replica("a", None), replica("b", 1, load=9)) == "b"
    assert found(replica("a", 0)) == "a"
    assert found(replica("a", 1), tried={"a"}) is None
    assert found() is None
