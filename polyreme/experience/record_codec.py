"""The codec of groups, and of the learner's results for their samples.

Invariant: every decoded group is consistent, and decoding after encoding preserves every bit. Number arrays are raw little-endian
bytes inside protobuf, so reading one is a view. Both directions validate, so no invalid group enters or leaves the log.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError
from polyreme.experience.metric_records import Line
from polyreme.experience.record_checks import check_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardCall, RewardPart, SampleRecord, ToolCall, Turn, UInt8

_I4: np.dtype[np.int32] = np.dtype("<i4")
_F4: np.dtype[np.float32] = np.dtype("<f4")
_U1: np.dtype[np.uint8] = np.dtype("u1")
"""The types of the payload's arrays."""
Number = TypeVar("Number", np.int32, np.float32, np.uint8)
FORMAT = 2
"""The number of the payload's layout."""
_DIGITS = 5  # of a float in the sample files


def encode_group(group: GroupRecord) -> bytes:
    """The serialized protobuf Group, with the same bytes for the same group. Raises DataError when the group is inconsistent."""
    check_group(group)
    message = pb.Group(
        index=group.index,
        attempt=group.attempt,
        prompt_ids=_raw(group.prompt_ids, _I4),
        prompt=group.prompt,
        label=group.label,
        generate_seconds=group.generate_seconds,
        score_seconds=group.score_seconds,
        began=group.began,
        format=FORMAT,
    )
    for episode in group.episodes:
        message.episodes.add(outcome=episode.outcome, messages=episode.messages, seconds=episode.seconds)
    for sample in group.samples:
        message.samples.add(
            token_ids=_raw(sample.token_ids, _I4),
            logprobs=_raw(sample.logprobs, _F4),
            loss_mask=_raw(sample.loss_mask, _U1),
            finish_reason=sample.finish_reason,
            spans=[pb.VersionSpan(version=version, start=start, end=end) for version, start, end in sample.spans],
            score=sample.score,
            parts=[
                pb.RewardPart(name=p.name, raw=p.raw, weighted=p.weighted, plugin_version=p.plugin_version) for p in sample.parts
            ],
            text=sample.text,
            token_rewards=b"" if sample.token_rewards is None else _raw(sample.token_rewards, _F4),
            teacher_logprobs=b"" if sample.teacher_logprobs is None else _raw(sample.teacher_logprobs, _F4),
            routes=b"" if sample.routes is None else _raw(sample.routes.reshape(-1), _U1),
            replicas=sample.replicas,
            calls=[pb.RewardCall(server=c.server, status=c.status, message=c.message, seconds=c.seconds) for c in sample.calls],
            **(_trajectory_fields(sample) if group.episodes else {}),
        )
    return bytes(message.SerializeToString(deterministic=True))


def decode_group(payload: bytes) -> GroupRecord:
    """The group of a payload. Its arrays are read-only views. Raises DataError when the payload is damaged or inconsistent."""
    try:
        message = pb.Group.FromString(payload)
    except DecodeError as error:
        raise DataError("a serialized Group", f"{len(payload)} other bytes ({error})", "Run `polyreme audit`.") from None
    if message.format != FORMAT:
        raise DataError(
            f"a group in format {FORMAT} of the experience log",
            f"group {message.index} in format {message.format or 1}",
            "Another release has written this log: continue with that release, or fork the run from a checkpoint.",
        )
    episodes = [EpisodeRecord(e.outcome, e.messages, e.seconds) for e in message.episodes]
    group = GroupRecord(
        index=message.index,
        attempt=message.attempt,
        prompt_ids=_array(message.prompt_ids, _I4),
        samples=[
            SampleRecord(
                token_ids=_array(sample.token_ids, _I4),
                logprobs=_array(sample.logprobs, _F4),
                loss_mask=_array(sample.loss_mask, _U1),
                finish_reason=sample.finish_reason,
                spans=[(span.version, span.start, span.end) for span in sample.spans],
                score=sample.score,
                parts=[RewardPart(p.name, p.raw, p.weighted, p.plugin_version) for p in sample.parts],
                text=sample.text,
                token_rewards=_array(sample.token_rewards, _F4) if sample.token_rewards else None,
                teacher_logprobs=_array(sample.teacher_logprobs, _F4) if sample.teacher_logprobs else None,
                routes=_routes(sample),
                replicas=tuple(sample.replicas),
                calls=tuple(RewardCall(c.server, c.status, c.message, c.seconds) for c in sample.calls),
                **(_trajectory(sample) if episodes else {}),
            )
            for sample in message.samples
        ],
        prompt=message.prompt,
        label=message.label,
        generate_seconds=message.generate_seconds,
        score_seconds=message.score_seconds,
        began=message.began,
        episodes=episodes,
    )
    check_group(group)
    return group


def _trajectory_fields(sample: SampleRecord) -> dict[str, object]:
    """The fields of a pb.Sample that only episodes have."""
    turns = [
        pb.Turn(
            start=turn.start,
            end=turn.end,
            reward=turn.reward,
            seconds=turn.seconds,
            tool_calls=[pb.ToolCall(**call._asdict()) for call in turn.tool_calls],
        )
        for turn in sample.turns
    ]
    prompt_ids = b"" if sample.prompt_ids is None else _raw(sample.prompt_ids, _I4)
    return {"prompt_ids": prompt_ids, "turns": turns, "episode": sample.episode}


def _trajectory(sample: pb.Sample) -> dict[str, Any]:
    """The fields of a SampleRecord that only episodes have."""
    turns = (
        Turn(
            turn.start,
            turn.end,
            turn.reward,
            turn.seconds,
            tuple(ToolCall(c.name, c.arguments, c.result, c.seconds, c.error) for c in turn.tool_calls),
        )
        for turn in sample.turns
    )
    prompt_ids = _array(sample.prompt_ids, _I4) if sample.prompt_ids else None
    return {"prompt_ids": prompt_ids, "turns": tuple(turns), "episode": sample.episode}


def _routes(sample: pb.Sample) -> UInt8 | None:
    """The routes of a sample, equally many bytes per token."""
    tokens = len(sample.token_ids) // 4
    if not sample.routes or not tokens:
        return None
    if len(sample.routes) % tokens:
        raise DataError(
            f"equally many bytes of routes for {tokens} tokens",
            f"{len(sample.routes)} bytes",
            "The payload is damaged: run `polyreme audit`.",
        )
    return _array(sample.routes, _U1).reshape(tokens, -1)


def _raw(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    if array.ndim != 1 or array.dtype != dtype.newbyteorder("="):
        raise DataError(f"a flat array of {dtype.name}", f"{array.dtype} of shape {array.shape}", "Convert it first.")
    return array.astype(dtype, copy=False).tobytes()


def _array(data: bytes, dtype: np.dtype[Number]) -> NDArray[Number]:
    if len(data) % dtype.itemsize:
        raise DataError(
            f"whole {dtype.itemsize}-byte numbers", f"{len(data)} bytes", "The payload is damaged: run `polyreme audit`."
        )
    array = np.frombuffer(data, dtype=dtype)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


@dataclass(frozen=True)
class TrainedSamples:
    """The learner's results for each sample of an iteration, in the order of its plan and of each group's samples: n samples with
    t tokens in total that the policy sampled.

    Attributes:
        advantages: float32 [t], 0 where the token was not trained on.
        weights: float32 [n], the sum of a sample's coefficients in the policy loss of an optimizer step, averaged over its steps.
        steps: int32 [n, epochs], the optimizer steps of the iteration, counted from 1, that trained the sample.
    """

    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    steps: NDArray[np.int32]

    def encode(self) -> bytes:
        """The serialized protobuf TrainedSamples."""
        advantages, weights = (values.astype("<f4").tobytes() for values in (self.advantages, self.weights))
        message = pb.TrainedSamples(advantages=advantages, weights=weights, steps=self.steps.astype("<i4").tobytes())
        return bytes(message.SerializeToString())

    @classmethod
    def decode(cls, payload: bytes) -> "TrainedSamples":
        """Raises DataError when the payload is damaged."""
        try:
            message = pb.TrainedSamples.FromString(payload)
            weights = np.frombuffer(message.weights, "<f4")
            steps = np.frombuffer(message.steps, "<i4").reshape(len(weights), -1) if len(weights) else np.zeros((0, 0), np.int32)
            return cls(np.frombuffer(message.advantages, "<f4"), weights, steps)
        except (DecodeError, ValueError) as error:
            raise DataError(
                "a serialized TrainedSamples", f"{len(payload)} other bytes ({error})", "Report this as a bug."
            ) from None

    def fields(self, lengths: Sequence[int]) -> Iterator[Line]:
        """Yields, for each sample, the fields of its line in the sample files.

        Args:
            lengths: the number of sampled tokens of each sample.

        Raises:
            DataError: the lengths do not match the samples.
        """
        if len(lengths) != len(self.weights) or sum(lengths) != len(self.advantages):
            found = f"{len(self.weights)} samples with {len(self.advantages)} tokens"
            raise DataError(f"{len(lengths)} trained samples with {sum(lengths)} tokens", found, "Report this as a bug.")
        end = 0
        for length, weight, steps in zip(lengths, self.weights.tolist(), self.steps.tolist(), strict=True):
            values = self.advantages[end : end + length]
            end += length
            constant = not length or bool((values == values[0]).all())
            advantage = (
                float(f"{values[0]:.{_DIGITS}g}") if constant and length else [round(float(value), _DIGITS) for value in values]
            )
            yield {"advantage": advantage, "weight": float(f"{weight:.{_DIGITS}g}"), "optimizer_steps": steps}
