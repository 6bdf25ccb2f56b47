"""Samples assembled from streams: contract violations are refused, and spans cover every token once."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import experience_pb2, rollout_pb2
from polyreme_trainer.orchestrator.generation.partial_rollouts import BadStreamError, PartialRollouts, merged
from polyreme_trainer.orchestrator.generation.rollout_parts import join_parts, part_since

STOP, LENGTH = experience_pb2.FINISH_REASON_STOP, experience_pb2.FINISH_REASON_LENGTH


def message(
    slot: int,
    ids: Sequence[int] = (),
    ends: list[tuple[int, int, int]] | None = None,
    version: int = 0,
    logprobs: int | None = None,
) -> rollout_pb2.GenerateResponse:
    chunks = [
        rollout_pb2.Chunk(
            slot=slot,
            token_ids=np.array(ids, "<i4").tobytes(),
            logprobs=np.zeros(len(ids) if logprobs is None else logprobs, "<f4").tobytes(),
            oldest_version=version,
        )
    ] if ids else []  # fmt: skip
    spans = [experience_pb2.VersionSpan(version=v, start=s, end=e) for v, s, e in ends or ()]
    return rollout_pb2.GenerateResponse(
        chunks=chunks, ends=[rollout_pb2.SlotEnd(slot=slot, finish_reason=STOP, spans=spans)] if ends is not None else []
    )


@pytest.mark.parametrize(
    "bad",
    [
        message(2, [5]),
        message(0, [5] * 9),
        message(0, [5, 6], logprobs=1),
        message(0, [5, 6], ends=[(0, 0, 1)]),
        message(0, [5, 6], ends=[(0, 0, 1), (1, 0, 2)]),
    ],
)
def test_what_the_contract_rules_out_is_refused(bad: rollout_pb2.GenerateResponse) -> None:
    rollouts = PartialRollouts(2, 8, [1])
    rollouts.start_call()
    with pytest.raises(BadStreamError):
        rollouts.add(bad)


def test_probabilities_of_diverged_weights_are_refused_by_their_version() -> None:
    bad = message(1, [5, 6, 7], version=4)
    bad.chunks[0].logprobs = np.array([-1.0, np.nan, -np.inf], "<f4").tobytes()
    rollouts = PartialRollouts(2, 8, [1])
    rollouts.start_call()
    rollouts.add(message(1, [5, 6]))
    with pytest.raises(BadStreamError, match="found 2 that are not, by version 4"):
        rollouts.add(bad)
    assert rollouts.samples[1].length == 2


def routed(ids: Sequence[int], each: int, version: int = 0) -> rollout_pb2.GenerateResponse:
    """Tokens of sequence 0, with `each` bytes of routes per token."""
    response = message(0, ids, version=version)
    response.chunks[0].routes = bytes(token + byte for token in ids for byte in range(each))
    return response


def test_routes_stay_with_their_tokens_through_cuts_snapshots_and_other_replicas() -> None:
    rollouts, prompt = PartialRollouts(1, 64, [1]), np.array([7], np.int32)
    rollouts.start_call()
    parts = [part_since([(0, 0)], rollouts, prompt)]
    rollouts.add(routed([5, 6, 7], 3, version=1))
    parts.append(part_since([(0, 0)], rollouts, prompt))
    marks = rollouts.marks()
    rollouts.start_call()
    rollouts.add(routed([8, 9], 3, version=2))
    parts.append(part_since(marks, rollouts, prompt))
    joined = join_parts(parts, prompt, PartialRollouts(1, 64, [1])).samples[0]
    expected = np.array([5, 6, 7, 8, 9], np.uint8)[:, None] + np.arange(3, dtype=np.uint8)
    for sample in (rollouts.samples[0], joined):
        np.testing.assert_array_equal(sample.token_routes(), expected)
    joined = join_parts(parts, prompt, PartialRollouts(1, 64, [1], min_version=2)).samples[0]
    assert joined.length == 0 and joined.token_routes() is None
    rollouts.min_version = 2
    rollouts.samples[0].spans = [(2, 0, 3), (1, 3, 5)]
    rollouts.drop_older()
    np.testing.assert_array_equal(rollouts.samples[0].token_routes(), expected[:3])


@pytest.mark.parametrize("each", [0, 2, 4])
def test_replicas_that_report_other_routes_are_refused(each: int) -> None:
    """All tokens of a sample have routes of one model, or none has routes."""
    rollouts = PartialRollouts(1, 64, [1])
    rollouts.start_call()
    rollouts.add(routed([5, 6, 7], 3))
    with pytest.raises(BadStreamError, match="bytes of routes"):
        rollouts.add(routed([8, 9], each))
    assert rollouts.samples[0].length == 3


def test_an_end_that_was_lost_with_its_replica() -> None:
    rollouts = PartialRollouts(3, 4, [1])
    rollouts.start_call()
    assert rollouts.add(message(0, [5, 1])) + rollouts.add(message(1, [5, 6, 7, 8])) + rollouts.add(message(2, [5])) == 7
    assert [sample.index for sample in rollouts.start_call()] == [2]
    assert [sample.finish_reason for sample in rollouts.samples] == [STOP, LENGTH, 0]


def test_exact_spans_replace_those_of_chunks() -> None:
    rollouts = PartialRollouts(1, 64, [1])
    rollouts.start_call()
    rollouts.add(message(0, [5] * 20, version=3))
    rollouts.start_call()
    rollouts.add(message(0, [6] * 30, version=3))
    rollouts.add(message(0, [1], ends=[(3, 0, 11), (4, 11, 31)], version=4))
    assert rollouts.samples[0].spans == [(3, 0, 31), (4, 31, 51)]


def test_what_is_too_old_is_cut_off_with_all_behind_it() -> None:
    rollouts = PartialRollouts(2, 96, (1,), min_version=3)
    rollouts.samples[0].ids, rollouts.samples[0].logprobs = bytearray(range(40)), bytearray(range(40))
    rollouts.samples[0].spans, rollouts.samples[0].finish_reason = [(4, 0, 6), (2, 6, 7), (3, 7, 10)], 1
    rollouts.drop_older()
    (first, _) = rollouts.samples
    assert (first.length, first.spans, first.finished, rollouts.cuts) == (6, [(4, 0, 6)], False, 1)
    assert first.ids == first.logprobs == bytearray(range(24))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5))))
def test_merged_spans_cover_the_same_and_alternate(pieces: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for version, length in pieces:
        spans.append((version, at, at + length))
        at += length
    result = merged(spans)
    assert [v for v, s, e in result for _ in range(s, e)] == [v for v, s, e in spans for _ in range(s, e)]
    assert all(a[0] != b[0] for a, b in pairwise(result))


def test_a_sample_names_the_replicas_that_sampled_it() -> None:
    rollouts = PartialRollouts(2, 8, (99,))
    for replica, chunks in (("a", [(0, [1, 2]), (1, [3])]), ("b", [(0, [4])]), ("b", [(0, [5])])):
        rollouts.start_call()
        for slot, ids in chunks:
            rollouts.add(message(slot, ids))
        rollouts.credit(replica)
    assert [sample.replicas for sample in rollouts.samples] == [["a", "b"], ["a"]]
    stored = part_since([(0, 0), (0, 0)], rollouts, np.array([7]))
    again = join_parts([stored], np.array([7]), PartialRollouts(2, 8, (99,)))
    assert [sample.replicas for sample in again.samples] == [["a", "b"], ["a"]], "also after another orchestrator takes over"
