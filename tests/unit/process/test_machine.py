"""The memory of the machine, or of the container."""

import pytest

from polyreme.process.machine import limit_of, memory_limit


@pytest.mark.parametrize(
    ("limits", "expected"), [([], 100), (["max"], 100), (["40"], 40), (["max", "60"], 60), (["9223372036854771712"], 100)]
)
def test_the_smallest_limit_counts(limits: list[str], expected: int) -> None:
    assert limit_of(100, limits) == expected


def test_this_machine_has_memory() -> None:
    assert memory_limit() > 2**20
