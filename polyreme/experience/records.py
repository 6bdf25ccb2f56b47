"""Experience as arrays, and its codec.

Invariant: every decoded group is consistent, and encoding followed by decoding preserves every bit. Number arrays are raw little-endian
bytes inside protobuf, so reading one is a view. Both directions validate, so no invalid group enters or leaves the log.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

_I4, _F4, _U1 = (np.dtype(code) for code in ("<i4", "<f4", "u1"))
"""The types of the payload's arrays."""


class RewardPart(NamedTuple):
    """One named component of a score: a reward or a sub-part (REWARD/NAME), with its raw value and that value times the reward's weight."""

    name: str
    raw: float
    weighted: float
    plugin_version: str = ""


class RewardCall(NamedTuple):
    """One call of a reward server that included a sample: the server's id, "ok" or what failed, and its wall-clock seconds."""

    server: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class SampleRecord:
    """One response of t tokens.

    Attributes:
        token_ids: int32 [t], the sampled tokens with the stop token.
        logprobs: float32 [t], of each token under the policy that sampled it, at the sampling temperature.
        loss_mask: uint8 [t], 1 if the policy sampled the token and it is trained on.
        finish_reason: pb.FINISH_REASON_STOP or pb.FINISH_REASON_LENGTH.
        spans: (version, start, end) of the policy versions, in order, covering [0, t).
        score: the reward, finite.
        token_rewards: float32 [t], the part of the score that rewards assigned to single tokens, or None.
        teacher_logprobs: float32 [t], of each token under the teacher of a distillation, or None.
        parts: the score is the sum of their weighted values without sub-parts.
        text: the response without special tokens, for display.
        routes: uint8 [t, r], the experts that the replica chose for the position before each token, layer by layer, in r bytes: each a
            uint8, or a uint16 (little-endian) where a layer has more than 256. Layers without experts have none. None: not reported.
        replicas: ids of the replicas that sampled its tokens, in order.
        calls: the newest calls of reward servers for it.
    """

    token_ids: Int32
    logprobs: Float32
    loss_mask: UInt8
    finish_reason: int
    spans: list[tuple[int, int, int]]
    score: float
    parts: list[RewardPart] = field(default_factory=list)
    text: str = ""
    token_rewards: Float32 | None = None
    teacher_logprobs: Float32 | None = None
    routes: UInt8 | None = None
    replicas: tuple[str, ...] = ()
    calls: tuple[RewardCall, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        return min(version for version, _, _ in self.spans)


@dataclass(frozen=True)
class GroupRecord:
    """The samples of one prompt.

    Attributes:
        index: index of the group in the run, which determines its prompt, order and seeds.
        attempt: number of the attempt, from 1.
        prompt_ids: int32 [p], the templated prompt.
        samples: at least one.
        prompt: the prompt as text, for display.
        label: the reference answer; may be empty.
        generate_seconds, score_seconds: wall-clock time of generation, and of scoring with the requests to a teacher.
        began: Unix time at which the attempt began; 0 when unknown.
    """

    index: int
    attempt: int
    prompt_ids: Int32
    samples: list[SampleRecord]
    prompt: str = ""
    label: str = ""
    generate_seconds: float = 0.0
    score_seconds: float = 0.0
    began: float = 0.0

    @property
    def oldest_version(self) -> int:
        return min(sample.oldest_version for sample in self.samples)

    @property
    def sampled(self) -> list[SampleRecord]:
        """The samples that are trained on: not a greedy baseline, which has no trained token. All, where none has one."""
        return [sample for sample in self.samples if sample.loss_mask.any()] or self.samples

    @property
    def mean_reward(self) -> float:
        return math.fsum(sample.score for sample in self.sampled) / len(self.sampled)


def encode_group(group: GroupRecord) -> bytes:
    """The serialized protobuf Group, with the same bytes for the same group. Raises DataError when the group is inconsistent."""
    _check(group)
    message = pb.Group(
        index=group.index,
        attempt=group.attempt,
        prompt_ids=_raw(group.prompt_ids, _I4),
        prompt=group.prompt,
        label=group.label,
        generate_seconds=group.generate_seconds,
        score_seconds=group.score_seconds,
        began=group.began,
    )
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
        )
    return bytes(message.SerializeToString(deterministic=True))


def decode_group(payload: bytes) -> GroupRecord:
    """The group of a payload. Its arrays are read-only views. Raises DataError when the payload is damaged or inconsistent."""
    try:
        message = pb.Group.FromString(payload)
    except DecodeError as error:
        raise DataError("a serialized Group", f"{len(payload)} other bytes ({error})", "Run `polyreme audit`.") from None
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
            )
            for sample in message.samples
        ],
        prompt=message.prompt,
        label=message.label,
        generate_seconds=message.generate_seconds,
        score_seconds=message.score_seconds,
        began=message.began,
    )
    _check(group)
    return group


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


def _raw(array: NDArray[np.generic], dtype: np.dtype[Any]) -> bytes:
    if array.ndim != 1 or array.dtype != dtype.newbyteorder("="):
        raise DataError(f"a flat array of {dtype.name}", f"{array.dtype} of shape {array.shape}", "Convert it first.")
    return array.astype(dtype, copy=False).tobytes()


def _array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise DataError(
            f"whole {dtype.itemsize}-byte numbers", f"{len(data)} bytes", "The payload is damaged: run `polyreme audit`."
        )
    array = np.frombuffer(data, dtype=dtype)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _check(group: GroupRecord) -> None:
    if not group.samples or not len(group.prompt_ids):
        raise _bad(group, "a prompt and at least one sample", f"{len(group.prompt_ids)} prompt ids, {len(group.samples)} samples")
    for number, sample in enumerate(group.samples):
        problem = _problem(sample)
        if problem:
            raise _bad(group, *problem, sample=number)


def _problem(sample: SampleRecord) -> tuple[str, str] | None:
    """What was expected and what was found in an inconsistent sample, else None."""
    length = len(sample.token_ids)
    lengths = (length, len(sample.logprobs), len(sample.loss_mask))
    if length == 0 or len(set(lengths)) > 1:
        return "token_ids, logprobs and loss_mask of one length above 0", f"lengths {lengths}"
    if sample.finish_reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
        return "a finish reason", str(sample.finish_reason)
    if (bad := _bad_numbers(sample.logprobs)) or not math.isfinite(sample.score):
        return "finite logprobs and score", f"score {sample.score}, {bad} bad logprobs"
    for name, numbers in (("token_rewards", sample.token_rewards), ("teacher_logprobs", sample.teacher_logprobs)):
        if numbers is not None and (len(numbers) != length or _bad_numbers(numbers)):
            return f"{length} finite {name}", f"{len(numbers)}, {_bad_numbers(numbers)} of them not finite"
    if sample.routes is not None and (sample.routes.ndim != 2 or len(sample.routes) != length or not sample.routes.size):
        return f"routes of {length} tokens", f"shape {sample.routes.shape}"
    if np.count_nonzero(sample.loss_mask > 1):
        return "a loss mask of 0 and 1", f"a {sample.loss_mask.max()}"
    at = 0
    for _, start, end in sample.spans:
        if start != at or end <= start:
            return f"version spans that follow each other and cover {length} tokens", str(sample.spans)
        at = end
    if at != length:
        return f"version spans that cover {length} tokens", str(sample.spans)
    return None


def _bad_numbers(numbers: Float32) -> int:
    """How many are not finite. (On short arrays `count_nonzero` is several times faster than `all` and `sum`.)"""
    return len(numbers) - int(np.count_nonzero(np.isfinite(numbers)))


def _bad(group: GroupRecord, expected: str, found: str, sample: int | None = None) -> DataError:
    place = f"group {group.index}" + ("" if sample is None else f", sample {sample}")
    return DataError(
        f"{expected} in {place}",
        found,
        "Report this as a bug of the part that created or stored the group. The group must not be used.",
    )
