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
from polyreme.experience.record_codec import decode_group, encode_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardPart, SampleRecord, ToolCall, Turn

ARRAYS = ("token_ids", "logprobs", "loss_mask", "token_rewards", "teacher_logprobs", "routes", "prompt_ids")
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


@st.composite
def trajectories(draw: st.DrawFn, episode: int, score: float) -> SampleRecord:
    """A sample whose tokens are in part the environment's."""
    sample = draw(samples())
    bounds = sorted(draw(st.sets(st.integers(0, len(sample)), max_size=5)) | {0, len(sample)})
    ranges = list(pairwise(bounds))[::2] if len(bounds) % 2 == 0 else [(0, len(sample))]
    outside = np.ones(len(sample), bool)
    for start, end in ranges:
        outside[start:end] = False
    calls = st.builds(ToolCall, text, text, text, finite, text)
    turns = [Turn(*each, draw(finite), draw(finite), tuple(draw(st.lists(calls, max_size=2)))) for each in ranges]
    return replace(
        sample,
        logprobs=np.where(outside, np.float32(0), sample.logprobs),
        loss_mask=np.where(outside, np.uint8(0), sample.loss_mask),
        spans=[(draw(st.integers(0, 9)), *each) for each in ranges],
        score=score,
        parts=[],
        turns=tuple(turns),
        episode=episode,
        prompt_ids=np.array([4, 5], np.int32) if draw(st.booleans()) else None,
    )


@st.composite
def groups_of_episodes(draw: st.DrawFn) -> GroupRecord:
    count = draw(st.integers(1, 3))
    members = [
        draw(trajectories(number, score))
        for number in range(count)
        for score in [draw(finite)]
        for _ in range(draw(st.integers(1, 2)))
    ]
    episodes = [EpisodeRecord(draw(st.sampled_from(pb.Outcome.values()[1:])), draw(text), draw(finite)) for _ in range(count)]
    return replace(draw(groups_of_responses), samples=members, episodes=episodes)


groups_of_responses = st.builds(
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
groups = groups_of_responses | groups_of_episodes()


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
        encode_group(GroupRecord(0, 1, np.array([], np.int32), [sample()]))


def test_the_log_of_another_release_is_refused_by_name() -> None:
    message = pb.Group.FromString(encode_group(GroupRecord(7, 1, np.array([1], np.int32), [sample()])))
    for number, name in ((0, 1), (3, 3)):  # the first layout had no number
        message.format = number
        with pytest.raises(DataError, match=f"format 2 of the experience log; found group 7 in format {name}"):
            decode_group(message.SerializeToString())


def trajectory(**changes: Any) -> SampleRecord:
    """Tokens 0 and 1 are the first turn, 2 and 3 the environment's, 4 the second turn."""
    bare = SampleRecord(
        np.arange(5, dtype=np.int32),
        np.array([-0.5, -1.0, 0.0, 0.0, -2.0], np.float32),
        np.array([1, 1, 0, 0, 1], np.uint8),
        pb.FINISH_REASON_STOP,
        [(3, 0, 2), (4, 4, 5)],
        1.0,
        turns=(Turn(0, 2, 0.5), Turn(4, 5)),
    )
    return replace(bare, **changes)


DONE = EpisodeRecord(pb.OUTCOME_STOP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": (Turn(0, 2),)}, "up to token 5"),
        ({"turns": (Turn(1, 2), Turn(4, 5))}, "from token 0"),
        ({"turns": (Turn(0, 2), Turn(1, 5))}, "follow each other"),
        ({"turns": (Turn(0, 0), Turn(0, 5))}, "follow each other"),
        ({"turns": (Turn(0, 2, float("nan")), Turn(4, 5))}, "finite rewards"),
        ({"spans": [(3, 0, 5)]}, "cover the turns"),
        ({"spans": [(3, 0, 2)]}, "cover the turns"),
        ({"spans": [(3, 4, 5), (3, 0, 2)]}, "cover the turns"),
        ({"loss_mask": np.ones(5, np.uint8)}, "outside of the turns"),
        ({"logprobs": np.full(5, -0.5, np.float32)}, "outside of the turns"),
        ({"prompt_ids": np.array([], np.int32)}, "a prompt of its own"),
        ({"episode": 2}, "in their order in group 7; found samples of the episodes"),
        ({"episode": 0}, "samples of 2 episodes"),
    ],
)
def test_an_inconsistent_trajectory_is_refused(changes: dict[str, Any], message: str) -> None:
    group = GroupRecord(
        7, 1, np.array([1], np.int32), [trajectory(), trajectory(**{"episode": 1, **changes})], episodes=[DONE, DONE]
    )
    with pytest.raises(DataError, match=message):
        encode_group(group)


def test_trajectories_need_episodes_and_outcomes() -> None:
    members = [trajectory(), trajectory(score=0.0)]
    with pytest.raises(DataError, match="one score in all samples of episode 0 in group 7"):
        encode_group(GroupRecord(7, 1, np.array([1], np.int32), members, episodes=[DONE]))
    group = GroupRecord(7, 1, np.array([1], np.int32), [trajectory()])
    with pytest.raises(DataError, match="expected episodes in group 7"):
        encode_group(group)
    with pytest.raises(DataError, match="an outcome"):
        encode_group(replace(group, episodes=[EpisodeRecord(pb.OUTCOME_UNSPECIFIED)]))


def test_an_episode_counts_once_however_many_trajectories_it_has() -> None:
    own = np.array([8, 9], np.int32)
    baseline = trajectory(loss_mask=np.zeros(5, np.uint8), score=9.0, episode=2)
    members = [trajectory(), trajectory(prompt_ids=own), trajectory(score=0.0, episode=1), baseline]
    group = GroupRecord(7, 1, np.array([1], np.int32), members, episodes=[DONE, DONE, DONE])
    assert group.mean_reward == 0.5
    assert ([each.score for each in group.scored], len(group.sampled), group.episode_of) == ([1.0, 0.0], 3, [0, 0, 1, 2])
    assert [group.prompt_of(each).tolist() for each in members] == [[1], [8, 9], [1], [1]]
    assert members[0].sampled_tokens == 3


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
