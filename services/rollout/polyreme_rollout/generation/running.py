"""The sequences that a replica is sampling, over all calls, and what a change of the policy does to them.

Invariant: a sequence is listed from its start until its task has ended. A sequence whose tokens all come from one version says
so, also when the policy changes while it waits for the engine or for its last tokens to be delivered.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme_rollout.generation.sequences import SequenceProgress
from polyreme_rollout.metrics import ReplicaMetrics

GATHER_SECONDS = 0.2
"""Default seconds that tokens may wait for others of their call. The death of a replica loses this much more generation."""
MOST_GATHER_SECONDS = 60.0


class PolicyLostError(Exception):
    """The replica serves no policy any more, so running sequences cannot finish here."""


class PolicyChangedError(Exception):
    """The replica serves a version that the call may not use."""


class GenerateCall:
    """The unsent results of one Generate call.

    Args:
        exact_version: the only version that may sample; None: any.
        gather_seconds: for which tokens may wait for others.
    """

    def __init__(self, exact_version: int | None, gather_seconds: float = GATHER_SECONDS) -> None:
        self.exact_version, self._gather_seconds = exact_version, gather_seconds
        self._chunks: dict[int, pb.Chunk] = {}  # unsent, by sequence
        self.response = pb.GenerateResponse()
        self.must_send = asyncio.Event()
        self.open_sequences = 0
        self.failure: Exception | None = None
        self._gathering: asyncio.TimerHandle | None = None

    def add(self, chunk: pb.Chunk) -> None:
        """Adds tokens to the unsent ones of their sequence."""
        if (unsent := self._chunks.get(chunk.slot)) is None:
            self.response.chunks.append(chunk)
            self._chunks[chunk.slot] = self.response.chunks[-1]
            return
        unsent.token_ids += chunk.token_ids
        unsent.logprobs += chunk.logprobs
        unsent.routes += chunk.routes
        unsent.oldest_version = min(unsent.oldest_version, chunk.oldest_version)

    def send_soon(self) -> None:
        """Schedules the response, whose tokens may wait for others."""
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(self._gather_seconds, self.must_send.set)

    def take(self) -> pb.GenerateResponse:
        """The response to send. A new, empty one replaces it."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self.must_send.clear()
        self._chunks.clear()
        response, self.response = self.response, pb.GenerateResponse()
        return response

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.must_send.set()


@dataclass
class RunningSequence:
    """A sequence that is being sampled.

    Attributes:
        number: unique in this process.
        request_id: id of its current or last engine request.
        sampling: the task that reads that request's tokens; None before the first request.
    """

    number: int
    progress: SequenceProgress
    call: GenerateCall
    request_id: str = ""
    sampling: "asyncio.Task[None] | None" = None


class RunningSequences:
    """All sequences that are being sampled. Runs on one event loop. `metrics` has their number."""

    def __init__(self, metrics: ReplicaMetrics) -> None:
        self._metrics = metrics
        self._sequences: dict[int, RunningSequence] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(list(self._sequences.values()))

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that may still be sampled."""
        return sum(sequence.progress.outstanding for sequence in self)

    def add(self, progress: SequenceProgress, call: GenerateCall) -> RunningSequence:
        """Lists a sequence of `call` until `remove`."""
        sequence = RunningSequence(next(self._numbers), progress, call)
        self._sequences[sequence.number] = sequence
        self._idle.clear()
        call.open_sequences += 1
        self._metrics.active_sequences.inc()
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        del self._sequences[sequence.number]
        self._metrics.active_sequences.dec()
        if not self._sequences:
            self._idle.set()

    async def drained(self) -> None:
        """Waits until no sequence is running."""
        await self._idle.wait()

    def change_policy(self, version: int, sampled: Mapping[str, int]) -> None:
        """Handles a change of the policy to `version`. `sampled`: tokens of each engine request at that moment.

        A request without a token starts again: its computed or cached prompt belongs to the previous version, while all its
        tokens would belong to this one. An ended request keeps the previous version: its last tokens may still be on their way.
        """
        for sequence in self:
            exact = sequence.call.exact_version
            if exact is not None and exact != version:
                sequence.call.fail(PolicyChangedError(f"expected version {exact} up to the end; found version {version}"))
            if sequence.progress.sampled and sequence.request_id not in sampled:
                continue  # ended
            count = max(sampled.get(sequence.request_id, 0), sequence.progress.sampled)
            sequence.progress.change_version(version, count)
            if sequence.sampling is not None and not count:
                sequence.sampling.cancel()

    def lose_policy(self) -> None:
        """Fails every running call, because no policy is left."""
        self.fail("a weight swap failed and no version could be restored: continue on another replica")

    def fail(self, reason: str) -> None:
        """Fails every running call with UNAVAILABLE."""
        for sequence in self:
            sequence.call.fail(PolicyLostError(reason))
