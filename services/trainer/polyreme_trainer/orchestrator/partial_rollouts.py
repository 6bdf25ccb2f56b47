"""Samples under way: chunks of one or several calls become whole samples. Pure.

Invariant: a draft's ids and logprobs have equal length, its spans cover that length in order, and nothing follows a stop token. So a
draft can be handed to another replica after any chunk, and the continuation starts exactly behind the last token that arrived.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyreme.api.v1 import experience_pb2, rollout_pb2

Span = tuple[int, int, int]  # version, start, end


Mark = tuple[int, int]  # tokens and finish reason that a draft had


class BadDraftError(Exception):
    """What was kept of drafts does not fit what is wanted now."""


class SteppedBackError(Exception):
    """A replica went back to a version that is too old: a learner that resumed trains its way up to the newest one again."""


class BadStreamError(Exception):
    """A replica answered something that its contract rules out."""


@dataclass
class Draft:
    """One sample: int32 ids and float32 logprobs as little-endian bytes, spans (version, start, end), why it ended (0: it has not)."""

    index: int
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)
    finish_reason: int = experience_pb2.FINISH_REASON_UNSPECIFIED
    call_start: int = 0

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


class Drafts:
    """The samples of one prompt, from the first call for them to the last.

    Args:
        count: how many, with indices 0 to count - 1.
        max_new: tokens of a whole sample at most.
        stop_ids: tokens that end one.
        min_version: the oldest policy that may write a token.

    Attributes:
        cuts: how often tokens were dropped again.
    """

    def __init__(self, count: int, max_new: int, stop_ids: Sequence[int], min_version: int = 0) -> None:
        self.drafts = [Draft(index) for index in range(count)]
        self.max_new, self.min_version, self.cuts = max_new, min_version, 0
        self._stop_ids = frozenset(stop_ids)

    def unfinished(self) -> list[Draft]:
        return [draft for draft in self.drafts if not draft.finished]

    def missing_tokens(self) -> int:
        """The most tokens that can still come."""
        return sum(self.max_new - draft.length for draft in self.unfinished())

    def tokens(self) -> int:
        """How many have come."""
        return sum(draft.length for draft in self.drafts)

    def marks(self) -> list[Mark]:
        """How far each draft is."""
        return [(draft.length, draft.finish_reason) for draft in self.drafts]

    def drop_older(self) -> None:
        """Cuts every sample in front of the first token that is older than it may be."""
        for draft in self.drafts:
            older = next((start for version, start, _ in draft.spans if version < self.min_version), None)
            if older is not None:
                del draft.ids[4 * older :], draft.logprobs[4 * older :]
                draft.spans = cut(draft.spans, older)
                draft.finish_reason = experience_pb2.FINISH_REASON_UNSPECIFIED
                self.cuts += 1

    def start_call(self) -> list[Draft]:
        """What a new call has to be asked for. A sample whose last token arrived but whose end was lost with its replica is ended here."""
        for draft in self.unfinished():
            if draft.length and int.from_bytes(draft.ids[-4:], "little", signed=True) in self._stop_ids:
                draft.finish_reason = experience_pb2.FINISH_REASON_STOP
            elif draft.length == self.max_new:
                draft.finish_reason = experience_pb2.FINISH_REASON_LENGTH
            draft.call_start = draft.length
        return self.unfinished()

    def add(self, response: rollout_pb2.GenerateResponse) -> int:
        """Takes in one message of the running call. Returns the tokens it brought.

        Raises:
            BadStreamError: it does not fit what was asked; the drafts hold what came before the misfit.
            SteppedBackError: it is of an older version than asked for; `drop_older` mends the drafts.
        """
        tokens = 0
        for chunk in response.chunks:
            tokens += self._add_chunk(chunk)
        for end in response.ends:
            self._end(end)
        if any(chunk.oldest_version < self.min_version for chunk in response.chunks):
            raise SteppedBackError
        return tokens

    def _running(self, slot: int) -> Draft:
        if slot >= len(self.drafts) or self.drafts[slot].finished:
            raise BadStreamError(f"expected only unfinished slots that were asked for, found slot {slot}")
        return self.drafts[slot]

    def _add_chunk(self, chunk: rollout_pb2.Chunk) -> int:
        draft, size = self._running(chunk.slot), len(chunk.token_ids)
        start, count = draft.length, size // 4
        if size % 4 or size != len(chunk.logprobs):
            raise BadStreamError(f"expected as many ids as logprobs, found {size} and {len(chunk.logprobs)} bytes")
        if start + count > self.max_new:
            raise BadStreamError(f"expected at most {self.max_new} tokens in slot {chunk.slot}, found {start + count}")
        draft.ids += chunk.token_ids
        draft.logprobs += chunk.logprobs
        if count:
            draft.spans = merged([*draft.spans, (chunk.oldest_version, start, start + count)])
        return count

    def _end(self, end: rollout_pb2.SlotEnd) -> None:
        draft = self._running(end.slot)
        exact = [(span.version, span.start + draft.call_start, span.end + draft.call_start) for span in end.spans]
        if not _covers(exact, draft.call_start, draft.length):
            raise BadStreamError(
                f"expected spans over tokens {draft.call_start} to {draft.length} of slot {end.slot}, found {exact}"
            )
        if end.finish_reason not in (experience_pb2.FINISH_REASON_STOP, experience_pb2.FINISH_REASON_LENGTH):
            raise BadStreamError(f"expected slot {end.slot} to end by stop or length, found finish reason {end.finish_reason}")
        draft.spans = merged([*cut(draft.spans, draft.call_start), *exact])
        draft.finish_reason = end.finish_reason


def part_since(marks: Sequence[Mark], drafts: Drafts, prompt_ids: np.ndarray) -> bytes:
    """A serialised Group with what came since `marks`: ids and logprobs behind them, and all spans of the drafts that changed."""
    part = experience_pb2.Group(prompt_ids=prompt_ids.astype("<i4").tobytes())
    for draft, mark in zip(drafts.drafts, marks, strict=True):
        if mark == (draft.length, draft.finish_reason):
            part.samples.add()
            continue
        part.samples.add(
            token_ids=bytes(draft.ids[4 * mark[0] :]),
            logprobs=bytes(draft.logprobs[4 * mark[0] :]),
            finish_reason=draft.finish_reason,
            spans=[experience_pb2.VersionSpan(version=version, start=start, end=end) for version, start, end in draft.spans],
        )
    return part.SerializeToString()


def joined(parts: Iterable[bytes], prompt_ids: np.ndarray, blank: Drafts) -> Drafts:
    """The drafts that the parts make up, in the place of `blank`, which says how many and how long they may be.

    Raises:
        BadDraftError: they are of another prompt, of another number of samples, or too long; or the parts do not make whole drafts.
    """
    prompt, drafts = prompt_ids.astype("<i4").tobytes(), [Draft(draft.index) for draft in blank.drafts]
    for payload in parts:
        part = experience_pb2.Group.FromString(payload)
        if part.prompt_ids != prompt or len(part.samples) != len(drafts):
            raise BadDraftError("expected drafts of this prompt's samples")
        for draft, sample in zip(drafts, part.samples, strict=True):
            if sample.token_ids or sample.finish_reason:
                draft.ids += sample.token_ids
                draft.logprobs += sample.logprobs
                draft.spans = [(span.version, span.start, span.end) for span in sample.spans]
                draft.finish_reason = sample.finish_reason
    for draft in drafts:
        if draft.length > blank.max_new or len(draft.ids) != len(draft.logprobs) or not _covers(draft.spans, 0, draft.length):
            raise BadDraftError(f"expected at most {blank.max_new} tokens with log-probabilities and spans")
    blank.drafts = drafts
    blank.drop_older()
    return blank


def merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbouring spans of one version as one."""
    result: list[Span] = []
    for version, start, end in spans:
        if result and result[-1][0] == version and result[-1][2] == start:
            result[-1] = (version, result[-1][1], end)
        else:
            result.append((version, start, end))
    return result


def cut(spans: Iterable[Span], length: int) -> list[Span]:
    """The part of the spans in front of token `length`."""
    return [(version, start, min(end, length)) for version, start, end in spans if start < length]


def _covers(spans: Sequence[Span], start: int, end: int) -> bool:
    for _, first, last in spans:
        if first != start or last <= first:
            return False
        start = last
    return start == end
