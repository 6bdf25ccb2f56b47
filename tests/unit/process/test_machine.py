"""The memory of the machine, or of the container."""

from pathlib import Path

import pytest

from polyreme.process import machine
from polyreme.process.machine import device_count, limit_of, memory_limit


@pytest.mark.parametrize(
    ("limits", "expected"), [([], 100), (["max"], 100), (["40"], 40), (["max", "60"], 60), (["9223372036854771712"], 100)]
)
def test_the_smallest_limit_counts(limits: list[str], expected: int) -> None:
    assert limit_of(100, limits) == expected


def test_this_machine_has_memory() -> None:
    assert memory_limit() > 2**20


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


def test_a_device_without_files_is_found_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device_count", lambda kind: 0)
    for count in (0, 2):
        monkeypatch.setattr(machine, "_driver_devices", lambda count=count: count)
        assert machine.has_device("cuda") == (count > 0) and not machine.has_device("npu")
