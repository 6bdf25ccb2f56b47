"""Partial rollouts: chunks of one or several calls become whole samples. Pure.

Invariant: a partial rollout's ids, log-probabilities and routes, if any, have equal length; its spans cover that length in order,
and nothing follows a stop token. So after any chunk, another replica can continue exactly after the last token that arrived.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyreme.api.v1 import experience_pb2, rollout_pb2

Span = tuple[int, int, int]  # version, start, end
Mark = tuple[int, int]  # tokens and finish reason of a partial rollout at some moment


class SteppedBackError(Exception):
    """A replica went back to a version that is too old, because a resumed learner trains up to the newest one again."""


class BadStreamError(Exception):
    """A replica violated the contract of Generate."""


@dataclass
class PartialRollout:
    """One sample: int32 ids and float32 log-probabilities as little-endian bytes, routes (equally many bytes per token, or none),
    spans (version, start, end), finish reason (0: none yet), and the ids of the replicas that sampled it.

    Attributes:
        call_start: its length when the newest call began.
        call_end: the length at which that call pauses it; None: the call samples it to its end.
        paused: whether it waits for a later call.
    """

    index: int
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    routes: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)
    finish_reason: int = experience_pb2.FINISH_REASON_UNSPECIFIED
    call_start: int = 0
    call_end: int | None = None
    paused: bool = False
    replicas: list[str] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids) // 4

    @property
    def finished(self) -> bool:
        return self.finish_reason != experience_pb2.FINISH_REASON_UNSPECIFIED

    def token_ids(self) -> np.ndarray:
        """int32 [length]."""
        return np.frombuffer(bytes(self.ids), dtype="<i4")

    def token_logprobs(self) -> np.ndarray:
        """float32 [length]."""
        return np.frombuffer(bytes(self.logprobs), dtype="<f4")

    def token_routes(self) -> np.ndarray | None:
        """uint8 [length, bytes per token], or None."""
        return np.frombuffer(bytes(self.routes), dtype="u1").reshape(self.length, -1) if self.routes else None

    @property
    def route_bytes(self) -> int:
        """Bytes of routes per token; 0 without routes."""
        return len(self.routes) // self.length if self.length else 0

    def shorten(self, length: int) -> None:
        """Drops the tokens from `length` on."""
        del self.routes[self.route_bytes * length :]
        del self.ids[4 * length :], self.logprobs[4 * length :]
        self.spans = cut(self.spans, length)


class PartialRollouts:
    """The samples of one prompt, over all calls for them.

    Args:
        count: number of samples, with indices 0 to count - 1.
        max_new: upper bound of a sample's tokens.
        stop_ids: tokens that end a sample.
        min_version: the oldest policy version that may sample a token.

    Attributes:
        cuts: how often tokens were dropped.
    """

    def __init__(self, count: int, max_new: int, stop_ids: Sequence[int], min_version: int = 0) -> None:
        self.samples = [PartialRollout(index) for index in range(count)]
        self.max_new, self.min_version, self.cuts = max_new, min_version, 0
        self._stop_ids = frozenset(stop_ids)

    def unfinished(self) -> list[PartialRollout]:
        return [sample for sample in self.samples if not sample.finished]

    def running(self) -> list[PartialRollout]:
        """The samples that the newest call has not ended."""
        return [sample for sample in self.unfinished() if not sample.paused]

    def missing_tokens(self) -> int:
        """Upper bound of the tokens that can still arrive from the newest call."""
        ends = ((sample, self.max_new if sample.call_end is None else sample.call_end) for sample in self.running())
        return sum(end - sample.length for sample, end in ends)

    def tokens(self) -> int:
        """Tokens that have arrived."""
        return sum(sample.length for sample in self.samples)

    def marks(self) -> list[Mark]:
        """The progress of each sample."""
        return [(sample.length, sample.finish_reason) for sample in self.samples]

    def drop_older(self) -> None:
        """Cuts each sample before its first token that is older than `min_version`."""
        for sample in self.samples:
            older = next((start for version, start, _ in sample.spans if version < self.min_version), None)
            if older is not None:
                sample.shorten(older)
                sample.finish_reason = experience_pb2.FINISH_REASON_UNSPECIFIED
                self.cuts += 1

    def end_lost(self) -> list[PartialRollout]:
        """Ends the samples whose last token arrived but whose end was lost with its replica. Returns those still unfinished."""
        for sample in self.unfinished():
            if sample.length and int.from_bytes(sample.ids[-4:], "little", signed=True) in self._stop_ids:
                sample.finish_reason = experience_pb2.FINISH_REASON_STOP
            elif sample.length == self.max_new:
                sample.finish_reason = experience_pb2.FINISH_REASON_LENGTH
        return self.unfinished()

    def start_call(self, tokens: Mapping[int, int] | None = None) -> list[PartialRollout]:
        """The samples that a new call must continue.

        Args:
            tokens: the most tokens to add to each sample, by index; a sample without an entry stays paused. None: no limit.
        """
        for sample in self.end_lost():
            sample.call_start, sample.call_end = sample.length, None
            sample.paused = tokens is not None and sample.index not in tokens
            if tokens is not None and not sample.paused:
                sample.call_end = min(self.max_new, sample.length + tokens[sample.index])
        return self.running()

    def credit(self, replica: str) -> None:
        """Notes the replica of the newest call at every sample that got tokens from it."""
        for sample in self.samples:
            if sample.length > sample.call_start and sample.replicas[-1:] != [replica]:
                sample.replicas.append(replica)
            sample.call_start = sample.length

    def add(self, response: rollout_pb2.GenerateResponse) -> int:
        """Adds one message of the running call. Returns its number of tokens.

        Raises:
            BadStreamError: the message violates the contract. What preceded the violation is kept.
            SteppedBackError: it contains tokens of an older version; call `drop_older`.
        """
        tokens = 0
        for chunk in response.chunks:
            tokens += self._add_chunk(chunk)
        for end in response.ends:
            self._end(end)
        if any(chunk.oldest_version < self.min_version for chunk in response.chunks):
            raise SteppedBackError
        return tokens

    def _running(self, index: int) -> PartialRollout:
        if index >= len(self.samples) or self.samples[index].finished or self.samples[index].paused:
            raise BadStreamError(f"expected only unfinished sequences of the request; found sequence {index}")
        return self.samples[index]

    def _add_chunk(self, chunk: rollout_pb2.Chunk) -> int:
        sample, size = self._running(chunk.slot), len(chunk.token_ids)
        start, count = sample.length, size // 4
        if size % 4 or size != len(chunk.logprobs):
            raise BadStreamError(f"expected as many ids as log-probabilities; found {size} and {len(chunk.logprobs)} bytes")
        if start + count > self.max_new:
            raise BadStreamError(f"expected at most {self.max_new} tokens in sequence {chunk.slot}; found {start + count}")
        if bad := count - int(np.count_nonzero(np.isfinite(np.frombuffer(chunk.logprobs, "<f4")))):
            raise BadStreamError(
                f"expected finite log-probabilities; found {bad} that are not, by version {chunk.oldest_version} or a newer one: "
                "its weights have diverged. Fix: lower trainer.optimizer.lr and continue from an earlier checkpoint"
            )
        if count and (len(chunk.routes) % count or (start and len(chunk.routes) != count * sample.route_bytes)):
            raise BadStreamError(
                f"expected equally many bytes of routes for every token of sequence {chunk.slot}, {sample.route_bytes} in its "
                f"first {start}; found {len(chunk.routes)} for {count} more"
            )
        sample.ids += chunk.token_ids
        sample.logprobs += chunk.logprobs
        sample.routes += chunk.routes if count else b""
        if count:
            sample.spans = merged([*sample.spans, (chunk.oldest_version, start, start + count)])
        return count

    def _end(self, end: rollout_pb2.SlotEnd) -> None:
        sample = self._running(end.slot)
        exact = [(span.version, span.start + sample.call_start, span.end + sample.call_start) for span in end.spans]
        if not covers(exact, sample.call_start, sample.length):
            raise BadStreamError(
                f"expected spans over tokens {sample.call_start} to {sample.length} of sequence {end.slot}; found {exact}"
            )
        if end.finish_reason not in (experience_pb2.FINISH_REASON_STOP, experience_pb2.FINISH_REASON_LENGTH):
            raise BadStreamError(
                f"expected sequence {end.slot} to end by stop or length; found finish reason {end.finish_reason}"
            )
        sample.spans = merged([*cut(sample.spans, sample.call_start), *exact])
        if end.finish_reason == experience_pb2.FINISH_REASON_LENGTH and sample.length == sample.call_end != self.max_new:
            sample.paused = True
        else:
            sample.finish_reason = end.finish_reason


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merges adjacent spans of one version."""
    result: list[Span] = []
    for version, start, end in spans:
        if result and result[-1][0] == version and result[-1][2] == start:
            result[-1] = (version, result[-1][1], end)
        else:
            result.append((version, start, end))
    return result


def cut(spans: Iterable[Span], length: int) -> list[Span]:
    """The spans of the first `length` tokens."""
    return [(version, start, min(end, length)) for version, start, end in spans if start < length]


def covers(spans: Sequence[Span], start: int, end: int) -> bool:
    """Whether the spans follow each other from `start` to `end`."""
    for _, first, last in spans:
        if first != start or last <= first:
            return False
        start = last
    return start == end
