"""Each verdict of `polyreme doctor` follows from its facts."""

import socket
from pathlib import Path

import pytest

from polyreme.cli.commands.doctor import port_failure
from polyreme.terminal.verdicts import (
    GIB,
    TempFacts,
    Verdict,
    clock_verdict,
    disk_verdict,
    exit_code,
    files_verdict,
    hub_verdict,
    installed_version,
    loopback_verdict,
    memory_verdict,
    packages_verdict,
    port_verdict,
    python_verdict,
    redis_verdict,
    shared_memory_verdict,
    temp_verdict,
)
from polyreme.weights.arena import shared_memory


def check(verdict: Verdict, level: str) -> None:
    """Checks the level of a verdict. Every verdict except "ok" has advice."""
    assert verdict.level == level
    assert bool(verdict.do) == (level != "ok")


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "ok"), ((3, 10), "missing"), ((3, 14), "missing")]
)
def test_python(version: tuple[int, int], level: str) -> None:
    check(python_verdict(version), level)


def test_packages_that_are_missing_are_named_beside_those_that_are_there() -> None:
    check(packages_verdict("trainer", {"torch": "2.13.0"}, "Install it."), "ok")
    verdict = packages_verdict("trainer", {"torch": "2.13.0", "megatron-core": None}, "Install it.")
    check(verdict, "missing")
    assert "no megatron-core" in verdict.found and "torch 2.13.0" in verdict.found


@pytest.mark.parametrize(("free", "level"), [(8 * GIB, "ok"), (GIB // 2, "note"), (2**25, "missing")])
def test_shared_memory(free: int, level: str) -> None:
    check(shared_memory_verdict(free, 16 * GIB), level)


def test_a_machine_without_shared_memory_lacks_it(tmp_path: Path) -> None:
    verdict = shared_memory_verdict(*shared_memory(tmp_path / "shm"))
    check(verdict, "missing")
    assert verdict.found == "none"
    free, total = shared_memory(tmp_path)
    assert 0 < free <= total


@pytest.mark.parametrize(("free", "level"), [(100 * GIB, "ok"), (GIB, "note")])
def test_disk(free: int, level: str) -> None:
    check(disk_verdict("/runs", free), level)


@pytest.mark.parametrize(("limit", "level"), [(65536, "ok"), (1024, "note")])
def test_open_files(limit: int, level: str) -> None:
    check(files_verdict(limit), level)


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (TempFacts("", "/tmp", 8 * GIB), "ok", "/tmp"),
        (TempFacts("/scratch", "/scratch", 8 * GIB), "ok", "/scratch"),
        (TempFacts("/long", "/tmp", 8 * GIB), "note", "in place of /long"),
        (TempFacts("", "/tmp", GIB // 4), "note", "0.2 GiB"),
        (TempFacts("", "/tmp", 8 * GIB, noexec=True), "note", "noexec"),
        (TempFacts("/gone", None), "missing", "/gone"),
    ],
)
def test_temporary_files(facts: TempFacts, level: str, words: str) -> None:
    check(verdict := temp_verdict(facts), level)
    assert words in verdict.found


@pytest.mark.parametrize(("address", "level"), [("127.0.0.1", "ok"), ("::1", "note"), (None, "missing")])
def test_loopback(address: str | None, level: str) -> None:
    check(loopback_verdict(address, "127.0.0.1: Cannot assign requested address"), level)


@pytest.mark.parametrize(("now", "level"), [(1_800_000_000.0, "ok"), (3600.0, "note")])
def test_the_clock(now: float, level: str) -> None:
    check(clock_verdict(now), level)


def test_memory_is_reported() -> None:
    assert "8.0 GiB" in memory_verdict(8 * GIB).found


def test_redis_and_ports_fail_with_their_reason() -> None:
    check(redis_verdict("redis://127.0.0.1:6379", None), "ok")
    check(redis_verdict("redis://127.0.0.1:6379", "Start one."), "missing")
    check(redis_verdict("redis://127.0.0.1:6379", None, "It has no password."), "note")
    check(port_verdict(8080, None), "ok")
    check(port_verdict(8080, "Choose another port."), "missing")


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        assert port_failure(listener.getsockname()[1])


def test_only_what_is_missing_fails_the_command() -> None:
    fine, limited, absent = (Verdict(level, "x", "y") for level in ("ok", "note", "missing"))
    assert exit_code([fine, limited]) == 0
    assert exit_code([fine, absent, fine]) == 1
    assert fine.line.split() == ["ok", "x", "y"]


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert installed_version("no-such-package-anywhere") is None
    assert installed_version("polyreme")


def test_without_a_hub_names_come_from_the_cache() -> None:
    assert hub_verdict("https://hub", "/cache", None).line == "ok       hub            https://hub answers; cache in /cache"
    verdict = hub_verdict("https://hub", "/cache", "offline mode (HF_HUB_OFFLINE)")
    assert (verdict.level, verdict.found) == ("note", "https://hub: offline mode (HF_HUB_OFFLINE)")
    assert "/cache" in verdict.do and "local paths need no hub" in verdict.do
