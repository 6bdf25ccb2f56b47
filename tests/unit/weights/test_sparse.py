"""The codec of changed elements is bit-exact for every element size, and detects damaged frames."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.weights import sparse
from polyreme.weights.sparse import ESCAPE, Changes, Frame, FrameError, Words

ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Words, Words]:
    """Two tensors' words, with any fraction changed, far apart or close together."""
    itemsize, size = draw(ITEMSIZES), draw(st.sampled_from([1, 7, 300, ESCAPE + 100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = rng.integers(0, 2 ** (8 * itemsize), size, np.uint64).astype(f"<u{itemsize}")
    changed = rng.random(size) < draw(st.sampled_from([0.0, 2 / size, 0.01, 0.3, 1.0]))
    return before, np.where(changed, rng.permutation(before), before)


@settings(max_examples=40)
@given(pairs())
def test_a_tensor_with_its_changes_applied_once_or_twice_has_the_new_bits(pair: tuple[Words, Words]) -> None:
    before, after = pair
    positions = sparse.find_changes(before, after)
    if not len(positions):
        assert before.tobytes() == after.tobytes()
        return
    frame = sparse.encode(Changes(positions, after[positions]))
    changes = sparse.decode(frame, before.itemsize, len(before))
    shadow = before.copy()
    for _ in range(2):
        sparse.apply(changes, shadow)
        assert shadow.tobytes() == after.tobytes()


@settings(max_examples=40)
@given(pairs())
def test_a_whole_tensor_needs_no_positions(pair: tuple[Words, Words]) -> None:
    before, after = pair
    frame = sparse.encode(Changes(None, after))
    assert frame.words == 0
    sparse.apply(sparse.decode(frame, before.itemsize, len(before)), before)
    assert before.tobytes() == after.tobytes()


@settings(max_examples=40)
@given(pairs(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_merged_changes_have_the_effect_of_both_in_turn(
    pair: tuple[Words, Words], seed: int, dense_first: bool, dense_then: bool
) -> None:
    first, second = pair
    third = np.where(np.random.default_rng(seed).random(len(second)) < 0.1, first[::-1], second)

    def changes(before: Words, after: Words, dense: bool) -> Changes:
        positions = sparse.find_changes(before, after)
        return Changes(None, after) if dense else Changes(positions, after[positions])

    merged = sparse.merge(changes(first, second, dense_first), changes(second, third, dense_then))
    shadow = first.copy()
    sparse.apply(merged, shadow)
    assert shadow.tobytes() == third.tobytes()


@pytest.mark.parametrize("gap", [1, ESCAPE - 1, ESCAPE, ESCAPE + 1, 2 * ESCAPE, 2 * ESCAPE + 1])
def test_gaps_around_the_escape_word(gap: int) -> None:
    positions = np.array([gap - 1, 2 * gap - 1], np.int64)
    frame = sparse.encode(Changes(positions, np.array([1, 2], "<u2")))
    assert sparse.decode(frame, 2, 2 * gap).positions is not None
    np.testing.assert_array_equal(sparse.decode(frame, 2, 2 * gap).positions, positions)
    with pytest.raises(FrameError):
        sparse.decode(frame, 2, 2 * gap - 1)


def test_comparison_in_pieces() -> None:
    before, after = np.zeros(1000, "<u4"), np.zeros(1000, "<u4")
    after[[0, 3, 4, 500, 999]] = 7
    assert sparse.find_changes(before, after, at_once=16).tolist() == [0, 3, 4, 500, 999]
    assert sparse.find_changes(before[:0], after[:0], at_once=16).tolist() == []


def test_nan_payloads_and_minus_zero_are_changes() -> None:
    before = np.array([0.0, np.nan, 1.0], "<f4").view("<u4")
    after = before.copy()
    after[0] |= 1 << 31
    after[1] ^= 1
    assert sparse.find_changes(before, after).tolist() == [0, 1]


@given(st.binary(max_size=60), st.integers(-1, 9), st.integers(-1, 9))
def test_bytes_that_are_no_frame_are_refused(data: bytes, changed: int, words: int) -> None:
    with pytest.raises(FrameError):
        sparse.decode(Frame(changed, words, data), 2, 8)


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_stays_within_the_tensor(at: int, flip: int) -> None:
    rng = np.random.default_rng(at)
    positions = np.flatnonzero(rng.random(1000) < 0.1)
    frame = sparse.encode(Changes(positions, rng.integers(0, 2**16, len(positions)).astype("<u2")))
    data = bytearray(frame.data)
    data[at % len(data)] ^= flip
    try:
        changes = sparse.decode(frame._replace(data=bytes(data)), 2, 1000)
    except FrameError:
        return
    sparse.apply(changes, np.zeros(1000, "<u2"))


def test_nothing_to_encode() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sparse.encode(Changes(np.empty(0, np.int64), np.empty(0, "<u2")))
