"""What a slot has sampled: chunks of it on their way, and which version wrote which tokens. Pure.

Kept here: every token leaves in exactly one chunk, in order; a chunk has at least CHUNK_TOKENS tokens unless it is the slot's
last; spans are contiguous from the slot's first sampled token.
"""

import struct
from collections.abc import Sequence

from polyreme.api.v1 import experience_pb2, rollout_pb2
from polyreme_rollout.engine.base import Delta

CHUNK_TOKENS = 16

_FINISH = {"stop": experience_pb2.FINISH_REASON_STOP, "length": experience_pb2.FINISH_REASON_LENGTH}


class SlotProgress:
    """One slot of one call.

    Args:
        index: the slot's number in its group.
        max_new: tokens it may still sample at the start.
        version: the policy that starts it.
    """

    def __init__(self, index: int, max_new: int, version: int) -> None:
        self.index, self.max_new = index, max_new
        self.sampled = 0
        self._sent = 0
        self._starts: list[tuple[int, int]] = [(version, 0)]  # (version, first token)
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def outstanding(self) -> int:
        """Tokens that this slot may still sample."""
        return self.max_new - self.sampled

    def cut(self, version: int, sampled: int) -> None:
        """The policy changed to `version` when the engine had sampled `sampled` tokens of the slot."""
        while self._starts and self._starts[-1][1] >= sampled:
            self._starts.pop()  # it wrote nothing
        self._starts.append((version, sampled if self._starts else 0))

    def add(self, delta: Delta) -> rollout_pb2.Chunk | None:
        """Takes tokens in; the chunk that is due, if one is."""
        if len(delta.token_ids) != len(delta.logprobs):
            raise ValueError(f"{len(delta.token_ids)} tokens with {len(delta.logprobs)} log-probabilities")
        self._ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self.sampled += len(delta.token_ids)
        if not self._ids or (len(self._ids) < CHUNK_TOKENS and delta.finish is None):
            return None
        start, self._sent = self._sent, self.sampled
        chunk = rollout_pb2.Chunk(
            slot=self.index,
            token_ids=pack_ids(self._ids),
            logprobs=struct.pack(f"<{len(self._logprobs)}f", *self._logprobs),
            oldest_version=min(version for version, first, end in self.spans() if end > start),
        )
        self._ids, self._logprobs = [], []
        return chunk

    def spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of the tokens so far, in order."""
        ends = [start for _, start in self._starts[1:]] + [self.sampled]
        clipped = [(version, start, min(end, self.sampled)) for (version, start), end in zip(self._starts, ends, strict=True)]
        return [(version, start, end) for version, start, end in clipped if start < end]

    def end(self, finish: str) -> rollout_pb2.SlotEnd:
        """The slot's last word."""
        spans = [experience_pb2.VersionSpan(version=v, start=start, end=end) for v, start, end in self.spans()]
        return rollout_pb2.SlotEnd(slot=self.index, finish_reason=_FINISH[finish], spans=spans)


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> list[int]:
    """Raises ValueError when the bytes are not whole int32 numbers."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not int32 numbers")
    return list(struct.unpack(f"<{len(data) // 4}i", data))
