"""The memory of the machine, or of the container."""

import os
from pathlib import Path

import pytest

from polyreme.process.machine import (
    MemoryKills,
    control_groups,
    core_limit,
    cores_of,
    device_count,
    has_device,
    limit_of,
    memory_limit,
)


@pytest.mark.parametrize(
    ("limits", "expected"), [([], 100), (["max"], 100), (["40"], 40), (["max", "60"], 60), (["9223372036854771712"], 100)]
)
def test_the_smallest_limit_counts(limits: list[str], expected: int) -> None:
    assert limit_of(100, limits) == expected


def test_this_machine_has_memory() -> None:
    assert memory_limit() > 2**20


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [([], 8), (["max 100000\n"], 8), (["max 100000", "250000 100000"], 2), (["50000 100000"], 1), (["1600000 100000"], 8)],
)
def test_the_smallest_quota_of_cores_counts(quotas: list[str], expected: int) -> None:
    assert cores_of(8, quotas) == expected


def test_this_machine_has_cores() -> None:
    assert 1 <= core_limit() <= (os.cpu_count() or 1)


V2, V1, BOTH = "0::/a/b\n", "9:name=systemd:/\n4:cpuset,memory:/a/b\n", "4:memory:/a/b\n0::/c\n"


@pytest.mark.parametrize(
    ("membership", "folders", "expected"),
    [
        (V2, ["a/b"], ["a/b", "a", ""]),
        (V2, [""], [""]),  # a container that sees the host's path
        ("0::/\n", ["a"], [""]),
        (V1, ["memory/a/b", "systemd"], ["memory/a/b", "memory/a", "memory"]),
        (V1, ["memory"], ["memory"]),
        (BOTH, ["memory/a/b", "c"], ["memory/a/b", "memory/a", "memory", "c", ""]),
        ("", ["a"], []),
        ("0::/../../x\n", ["a"], [""]),
    ],
)
def test_the_control_groups_of_a_process(tmp_path: Path, membership: str, folders: list[str], expected: list[str]) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    assert control_groups(membership, tmp_path) == [tmp_path / folder for folder in expected]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (MemoryKills(2, 9), ""),
        (MemoryKills(3, 10), "a process for memory: the limit is 1,200 MiB"),
        (MemoryKills(4, 11), "2 processes for memory: the limit is 1,200 MiB"),
        (MemoryKills(2, 10), "a process of this machine for memory: it has 4,096 MiB"),
    ],
)
def test_what_the_kernel_killed_for_memory(now: MemoryKills, words: str) -> None:
    found = now.since(MemoryKills(2, 9), 1200 * 2**20, 2**32)
    assert words in found and bool(found) == bool(words)


def test_devices_are_counted_and_their_managers_are_not(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "davinci7", "davinci_manager"):
        (tmp_path / name).touch()
    assert (device_count("cuda", tmp_path, {}), device_count("npu", tmp_path, {})) == (2, 1)


@pytest.mark.parametrize(("visible", "expected"), [("1", 1), ("0,1", 2), ("0, 1,2,3", 2), ("", 0)])
def test_only_visible_devices_count(tmp_path: Path, visible: str, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "davinci0"):
        (tmp_path / name).touch()
    assert device_count("cuda", tmp_path, {"CUDA_VISIBLE_DEVICES": visible}) == expected
    assert device_count("npu", tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert device_count("npu", tmp_path, {"ASCEND_RT_VISIBLE_DEVICES": ""}) == 0


@pytest.mark.parametrize("count", [0, 2])
def test_a_device_without_files_is_found_by_the_driver(count: int, tmp_path: Path) -> None:
    assert has_device("cuda", tmp_path, lambda: count) == (count > 0) and not has_device("npu", tmp_path, lambda: count)
