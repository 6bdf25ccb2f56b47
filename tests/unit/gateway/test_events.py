"""Whole events for any split of the bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polyreme.gateway.reply import DONE, EventSplitter, error_code, is_done

STREAM = b'data: {"a":1}\n\n: a comment\n\ndata: {"b":"\xc3\xa9"}\n\n' + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_whole_and_unchanged(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    splitter = EventSplitter()
    parts = [splitter.feed(STREAM[first:last]) for first, last in pairwise(places)]
    assert b"".join(parts) == STREAM
    assert all(part == b"" or part.endswith(b"\n\n") for part in parts)


def test_an_incomplete_event_is_kept_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert splitter.feed(b"\n") == b""
    assert splitter.feed(b"\n") == b"data: 2\n\n"


def test_the_end_of_a_stream() -> None:
    assert is_done(STREAM)
    assert not is_done(STREAM[: -len(DONE)])


def test_an_error_is_the_last_event() -> None:
    error = b'data: {"error":{"code":"policy_version"}}\n\n'
    assert error_code(STREAM + error) == error_code(error) == "policy_version"
    assert error_code(b'data: {"error":{"message":"a"}}\n\n') == error_code(b'data: {"error":"a"}\n\n') == ""
    assert error_code(error + b'data: {"choices":[]}\n\n') is None
    assert error_code(STREAM) is None and error_code(b"") is None
