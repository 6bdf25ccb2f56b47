"""The transfer of a version from those of its parts."""

from dataclasses import replace

import pytest

from polyreme_trainer.weight_sync.replica_state import Transfer, total

WHOLE = Transfer("stream", 100, hops=1)
DELTA = Transfer("delta", 3, hops=1, density=0.25, encode_seconds=0.5, apply_seconds=0.125)


def relayed(part: Transfer, source: str, hops: int) -> Transfer:
    """The same part, fetched from a replica."""
    return replace(part, bytes=0, relayed_bytes=part.bytes, source=source, hops=hops)


@pytest.mark.parametrize("part", [WHOLE, DELTA, relayed(WHOLE, "r1", 2), relayed(DELTA, "r1", 3)])
def test_the_transfer_of_a_single_part_is_that_of_the_version(part: Transfer) -> None:
    assert total([part], [100]) == part


def test_whole_parts_are_a_stream_of_all_their_bytes() -> None:
    assert total([WHOLE, replace(WHOLE, bytes=50)], [100, 50]) == replace(WHOLE, bytes=150)


def test_seconds_of_deltas_are_added_and_their_density_is_a_mean_over_bytes() -> None:
    other = replace(DELTA, bytes=4, density=0.5, encode_seconds=1.0, apply_seconds=1.0)
    assert total([DELTA, other], [300, 100]) == Transfer("delta", 7, None, 1, None, 0.3125, 1.5, 1.125)


def test_a_whole_part_beside_a_delta_has_density_one_and_no_seconds() -> None:
    assert total([WHOLE, DELTA], [100, 300]) == replace(DELTA, bytes=103, density=(100 + 75) / 400)


def test_relayed_bytes_count_apart_and_each_source_is_named_once() -> None:
    parts = [relayed(WHOLE, "r2", 2), WHOLE, relayed(DELTA, "r1", 3), relayed(WHOLE, "r2", 2)]
    found = total(parts, [100, 100, 100, 100])
    assert (found.bytes, found.relayed_bytes, found.hops, found.source) == (100, 203, 3, "r1, r2")


def test_every_part_has_a_size() -> None:
    with pytest.raises(ValueError, match="shorter"):
        total([WHOLE, DELTA], [100])
