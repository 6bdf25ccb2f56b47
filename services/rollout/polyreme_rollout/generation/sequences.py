"""The progress of one sequence: chunks to send, and the policy version of each token. Pure.

Invariant: every token leaves in exactly one chunk, in order; a chunk has at least CHUNK_TOKENS tokens unless it is the last of
its sequence; version spans are contiguous from the first sampled token.
"""

import struct
from collections.abc import Sequence

from polyreme.api.v1 import experience_pb2, rollout_pb2
from polyreme_rollout.engine.protocol import CHUNK_TOKENS, NewTokens

_FINISH = {"stop": experience_pb2.FINISH_REASON_STOP, "length": experience_pb2.FINISH_REASON_LENGTH}


class SequenceProgress:
    """One sequence of one Generate call.

    Args:
        index: the sample's position in its group.
        max_new: upper bound of tokens to sample.
        version: the policy version at the start.
    """

    def __init__(self, index: int, max_new: int, version: int) -> None:
        self.index, self.max_new = index, max_new
        self.sampled = 0
        self._sent = 0
        self._starts: list[tuple[int, int]] = [(version, 0)]  # (version, first token)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._routes = bytearray()

    @property
    def outstanding(self) -> int:
        """Tokens that this sequence may still sample."""
        return self.max_new - self.sampled

    def change_version(self, version: int, sampled: int) -> None:
        """Records that the policy changed to `version` after the engine had sampled `sampled` tokens of this sequence."""
        while self._starts and self._starts[-1][1] >= sampled:
            self._starts.pop()  # that version sampled no token
        self._starts.append((version, sampled if self._starts else 0))

    def add(self, delta: NewTokens) -> rollout_pb2.Chunk | None:
        """Takes new tokens. Returns a chunk when one is complete.

        Raises:
            ValueError: ids and log-probabilities differ in number, or tokens have different numbers of route bytes.
        """
        if len(delta.token_ids) != len(delta.logprobs):
            raise ValueError(
                f"expected a log-probability per token; found {len(delta.token_ids)} tokens, {len(delta.logprobs)} values"
            )
        if len(delta.routes) % max(1, len(delta.token_ids)):
            raise ValueError(
                f"expected equally many bytes of routes per token; found {len(delta.token_ids)} tokens, {len(delta.routes)} bytes"
            )
        self._ids.extend(delta.token_ids)
        self._routes += delta.routes
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
            routes=bytes(self._routes),
        )
        self._ids, self._logprobs, self._routes = [], [], bytearray()
        return chunk

    def spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end) of the sampled tokens, in order."""
        ends = [start for _, start in self._starts[1:]] + [self.sampled]
        clipped = [(version, start, min(end, self.sampled)) for (version, start), end in zip(self._starts, ends, strict=True)]
        return [(version, start, end) for version, start, end in clipped if start < end]

    def end(self, finish: str) -> rollout_pb2.SlotEnd:
        """The message that ends this sequence."""
        spans = [experience_pb2.VersionSpan(version=v, start=start, end=end) for v, start, end in self.spans()]
        return rollout_pb2.SlotEnd(slot=self.index, finish_reason=_FINISH[finish], spans=spans)


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError for a length that is no multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"expected int32 numbers; found {len(data)} bytes")
    return list(struct.unpack(f"<{len(data) // 4}i", data))
