from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord, decode_group, encode_group

ARRAYS = ("token_ids", "logprobs", "loss_mask", "token_rewards", "teacher_logprobs", "routes")
finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=20)


@st.composite
def spans(draw: st.DrawFn, length: int) -> list[tuple[int, int, int]]:
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=3)) | {0, length})
    return [(draw(st.integers(0, 2**63)), start, end) for start, end in pairwise(cuts)]


@st.composite
def samples(draw: st.DrawFn) -> SampleRecord:
    length = draw(st.integers(1, 12))

    def numbers(each: st.SearchStrategy[Any], dtype: type) -> Any:
        return np.array(draw(st.lists(each, min_size=length, max_size=length)), dtype)

    single = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return SampleRecord(
        token_ids=numbers(st.integers(-(2**31), 2**31 - 1), np.int32),
        logprobs=numbers(single, np.float32),
        loss_mask=numbers(st.integers(0, 1), np.uint8),
        finish_reason=draw(st.sampled_from([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH])),
        spans=draw(spans(length)),
        score=draw(finite),
        parts=draw(st.lists(st.builds(RewardPart, text, finite, finite, text), max_size=2)),
        text=draw(text),
        token_rewards=numbers(single, np.float32) if draw(st.booleans()) else None,
        teacher_logprobs=numbers(single, np.float32) if draw(st.booleans()) else None,
        routes=draw(
            st.none() | st.integers(1, 4).map(lambda each: np.arange(length * each, dtype=np.uint8).reshape(length, each))
        ),
    )


groups = st.builds(
    GroupRecord,
    index=st.integers(0, 2**63),
    attempt=st.integers(1, 2**31),
    prompt_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8).map(lambda ids: np.array(ids, np.int32)),
    samples=st.lists(samples(), min_size=1, max_size=3),
    prompt=text,
    label=text,
    generate_seconds=finite,
    score_seconds=finite,
)


def assert_same(a: GroupRecord, b: GroupRecord) -> None:
    bare: dict[str, Any] = {"prompt_ids": None, "samples": []}
    assert replace(a, **bare) == replace(b, **bare)
    np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids, strict=True)
    for left, right in zip(a.samples, b.samples, strict=True):
        for name in ARRAYS:
            found, expected = getattr(left, name), getattr(right, name)
            assert (found is None) == (expected is None)
            if expected is not None:
                assert (
                    found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()
                )  # bit by bit, including minus zero
        rest: dict[str, Any] = dict.fromkeys(ARRAYS)
        assert replace(left, **rest) == replace(right, **rest)


@given(groups)
def test_what_is_encoded_comes_back_to_the_bit(group: GroupRecord) -> None:
    payload = encode_group(group)
    assert_same(decode_group(payload), group)
    assert encode_group(decode_group(payload)) == payload


@given(groups, st.data())
def test_damage_is_an_error_or_another_valid_group(group: GroupRecord, data: st.DataObject) -> None:
    payload = bytearray(encode_group(group))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(payload), bytes(payload[: data.draw(st.integers(0, len(payload)))])):
        with suppress(DataError):  # any other error would crash the learner
            decode_group(damaged)


def sample(**changes: Any) -> SampleRecord:
    return replace(
        SampleRecord(
            np.array([5, 6, 7], np.int32),
            np.array([-0.5, -1.0, 0.0], np.float32),
            np.array([1, 1, 1], np.uint8),
            pb.FINISH_REASON_STOP,
            [(3, 0, 2), (4, 2, 3)],
            1.0,
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, r"group 7, sample 1; found lengths \(3, 2, 3\)"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "finite logprobs"),
        ({"score": float("nan")}, "score nan"),
        ({"token_rewards": np.zeros(2, np.float32)}, "3 finite token_rewards"),
        ({"token_rewards": np.array([0, np.inf, 0], np.float32)}, "1 of them not finite"),
        ({"token_rewards": np.zeros(3)}, "flat array of float32; found float64"),
        ({"teacher_logprobs": np.zeros(4, np.float32)}, "3 finite teacher_logprobs"),
        ({"token_ids": np.zeros(3, np.int64)}, "flat array of int32; found int64"),
        ({"loss_mask": np.array([0, 1, 2], np.uint8)}, "a loss mask of 0 and 1"),
        ({"finish_reason": 0}, "a finish reason"),
        ({"spans": []}, "cover 3 tokens"),
        ({"spans": [(0, 0, 2)]}, "cover 3 tokens"),
        ({"spans": [(0, 0, 2), (1, 1, 3)]}, "follow each other"),
        ({"spans": [(0, 0, 2), (1, 2, 2), (1, 2, 3)]}, "follow each other"),
        ({"spans": [(0, 0, 4)]}, "cover 3 tokens"),
    ],
)
def test_an_inconsistent_sample_is_refused(changes: dict[str, Any], message: str) -> None:
    group = GroupRecord(7, 1, np.array([1, 2], np.int32), [sample(), sample(**changes)])
    with pytest.raises(DataError, match=message):
        encode_group(group)


def test_a_group_needs_a_prompt_and_samples() -> None:
    with pytest.raises(DataError, match="at least one sample"):
        encode_group(GroupRecord(0, 1, np.array([1], np.int32), []))
    with pytest.raises(DataError, match="a prompt"):
        decode_group(b"")


def test_oldest_version_and_mean_reward() -> None:
    group = GroupRecord(0, 1, np.array([1], np.int32), [sample(score=1.0), sample(score=0.0, spans=[(9, 0, 3)])])
    assert (group.oldest_version, group.mean_reward) == (3, 0.5)
    assert len(group.samples[0]) == 3


def test_numbers_per_token_cost_nothing_where_there_are_none() -> None:
    without, having = (encode_group(GroupRecord(1, 1, np.array([1], np.int32), [s])) for s in (sample(), rewarded()))
    message = pb.Group.FromString(without).samples[0]
    assert (message.token_rewards, message.teacher_logprobs) == (b"", b"")
    assert len(having) - len(without) == 2 * (2 + 3 * 4)
    decoded = decode_group(having).samples[0]
    assert decoded.token_rewards is not None and decoded.token_rewards.tolist() == [0.5, 0.0, -1.0]


def rewarded() -> SampleRecord:
    numbers = np.array([0.5, 0.0, -1.0], np.float32)
    return sample(token_rewards=numbers, teacher_logprobs=numbers)


def test_the_wire_is_little_endian_and_stable() -> None:
    payload = encode_group(GroupRecord(1, 1, np.array([258], np.int32), [sample()]))
    message = pb.Group.FromString(payload)
    assert message.prompt_ids == b"\x02\x01\x00\x00"
    assert message.samples[0].logprobs[4:8] == b"\x00\x00\x80\xbf"
    with pytest.raises(ValueError, match="read-only"):
        decode_group(payload).samples[0].logprobs[0] = 0
