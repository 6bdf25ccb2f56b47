"""The memory of the machine, or of the container."""

from pathlib import Path

import pytest

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
    assert (device_count("cuda", tmp_path), device_count("npu", tmp_path)) == (2, 1)
