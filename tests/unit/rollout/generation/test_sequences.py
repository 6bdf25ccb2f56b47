"""Chunks and spans of one sequence, for any sizes of an engine's deltas and any moment of a swap."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import experience_pb2
from polyreme_rollout.engine.protocol import CHUNK_TOKENS, NewTokens
from polyreme_rollout.generation.sequences import SequenceProgress, pack_ids, unpack_ids

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def deltas(sizes: list[int], finish: str = "length") -> list[NewTokens]:
    ids = iter(range(sum(sizes)))
    parts = [[next(ids) for _ in range(size)] for size in sizes]
    return [NewTokens(part, [-id / 8 for id in part], finish if i == len(sizes) - 1 else None) for i, part in enumerate(parts)]


@given(SIZES)
def test_every_token_leaves_once_in_order_and_chunks_are_large(sizes: list[int]) -> None:
    sequence = SequenceProgress(3, sum(sizes), version=7)
    chunks = [chunk for delta in deltas(sizes) if (chunk := sequence.add(delta))]
    ids = np.concatenate([np.frombuffer(chunk.token_ids, "<i4") for chunk in chunks] or [np.array([], "<i4")])
    logprobs = np.concatenate([np.frombuffer(chunk.logprobs, "<f4") for chunk in chunks] or [np.array([], "<f4")])
    assert ids.tolist() == list(range(sum(sizes)))
    assert logprobs.tolist() == [-id / 8 for id in ids]
    assert all(len(chunk.token_ids) >= 4 * CHUNK_TOKENS for chunk in chunks[:-1])
    assert {(chunk.slot, chunk.oldest_version) for chunk in chunks} <= {(3, 7)}
    assert sequence.outstanding == 0


@given(SIZES, st.data())
def test_spans_record_the_version_of_each_token(sizes: list[int], data: st.DataObject) -> None:
    """The engine is ahead of the arrived tokens. Swaps occur between arrivals, at counts that never decrease."""
    total = sum(sizes)
    writer = [0] * total
    sequence, arrived, count = SequenceProgress(0, total, 0), 0, 0
    chunks: list[Any] = []
    for delta in deltas(sizes):
        for version in data.draw(st.lists(st.integers(1, 5), max_size=2)):
            count = data.draw(st.integers(max(count, arrived), total))
            sequence.change_version(version, count)
            writer[count:] = [version] * (total - count)
        first = sum(len(chunk.token_ids) // 4 for chunk in chunks)
        arrived += len(delta.token_ids)
        if chunk := sequence.add(delta):
            assert chunk.oldest_version == min(writer[first : sequence.sampled])
            chunks.append(chunk)
    spans = sequence.end("length").spans
    assert [span.version for span in spans for _ in range(span.start, span.end)] == writer
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == total


def test_routes_leave_with_their_tokens() -> None:
    sequence = SequenceProgress(0, 40, version=1)
    sizes = (10, 20, 1)
    ids = iter(range(sum(sizes)))
    parts = [[next(ids) for _ in range(size)] for size in sizes]
    deltas = [NewTokens(part, [0.0] * len(part), None, bytes(byte for token in part for byte in (token, 9))) for part in parts]
    deltas.append(NewTokens([31], [0.0], "stop", bytes([31, 9])))
    chunks = [chunk for delta in deltas if (chunk := sequence.add(delta))]
    assert b"".join(chunk.routes for chunk in chunks) == bytes(byte for token in range(32) for byte in (token, 9))
    assert all(len(chunk.routes) == 2 * len(unpack_ids(chunk.token_ids)) for chunk in chunks)
    with pytest.raises(ValueError, match="bytes of routes"):
        SequenceProgress(0, 40, version=1).add(NewTokens([1, 2], [0.0, 0.0], None, b"abc"))


def test_a_swap_before_the_first_token_leaves_one_span() -> None:
    sequence = SequenceProgress(0, 4, version=1)
    sequence.change_version(2, 0)
    sequence.change_version(3, 0)
    chunk = sequence.add(NewTokens([5, 6], [0.0, 0.0], "stop"))
    assert chunk is not None
    assert chunk.oldest_version == 3
    end = sequence.end("stop")
    assert [(span.version, span.start, span.end) for span in end.spans] == [(3, 0, 2)]
    assert end.finish_reason == experience_pb2.FINISH_REASON_STOP


def test_tokens_without_their_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 value"):
        SequenceProgress(0, 4, 0).add(NewTokens([1, 2], [0.0], None))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_survive_the_wire(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    with pytest.raises(ValueError, match="int32"):
        unpack_ids(pack_ids(ids) + b"x")
