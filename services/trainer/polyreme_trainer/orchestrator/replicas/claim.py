"""The right to call one replica, with the tokens that the call may sample.

Invariant: a claim adds its tokens and sequences to its target when it is made, and has removed all of them when it ends.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from polyreme.api.v1 import rollout_pb2
from polyreme.api.v1.rollout_pb2_grpc import RolloutServiceStub
from polyreme.net.many_calls import ManyCalls
from polyreme_trainer.orchestrator.replicas.router import FAILURE_BACKOFF, Target
from polyreme_trainer.orchestrator.replicas.straggler_detection import Pace

ReplicaCalls = ManyCalls[rollout_pb2.GenerateRequest, rollout_pb2.GenerateResponse]


def replica_calls(channel: grpc.aio.Channel) -> ReplicaCalls:
    """The calls to the replica at the other end of a channel."""
    return ManyCalls(channel, RolloutServiceStub(channel).GenerateMany, rollout_pb2.GenerateManyRequest)


@dataclass(eq=False)
class Claim:
    """One claim on a target.

    Attributes:
        tokens: upper bound of the tokens that can still arrive.
        sequences: samples that have not ended on the replica.
        pace: the replica's pace.
        since: when the claim was made, monotonic seconds.
        on_capacity: called when the replica can take other samples.
        is_cut: whether the replica must no longer be called.
        chunk_timeout: maximum seconds between two messages of the running call.
        asleep: whether the replica has left its devices.
        deadline: deadline of the running call; moved forward when the replica's lease ends or the replica is suspended.
    """

    target: Target
    calls: ReplicaCalls
    tokens: int
    sequences: int
    pace: Pace
    since: float
    on_capacity: Callable[[], None]
    chunk_timeout: float = 0.0
    asleep: bool = False
    deadline: asyncio.Timeout | None = None
    is_cut: bool = False
    _chunk_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target.outstanding += self.tokens
        self.target.sequences += self.sequences
        self.pace.change(self.sequences, self.since)

    def arrived(self, tokens: int, missing: int, response: rollout_pb2.GenerateResponse, now: float) -> None:
        """A response with `tokens` tokens arrived; at most `missing` can still arrive."""
        self.target.outstanding -= self.tokens - missing
        self.tokens = missing
        self.target.failures = 0
        self.pace.arrived(tokens, now)
        if not self._chunk_at:
            self.pace.first_after(now - self.since)
        for chunk in response.chunks:
            if (before := self._chunk_at.get(chunk.slot)) is not None:
                self.pace.chunk_after(now - before)
            self._chunk_at[chunk.slot] = now
        if response.ends:
            self._ended(len(response.ends), now)

    def end(self, now: float) -> None:
        """Removes the claim's remaining tokens and sequences from its target."""
        self.target.outstanding -= self.tokens
        self._ended(self.sequences, now)

    def cut(self) -> None:
        """Ends the running call, or prevents one that has not started."""
        self.is_cut = True
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def suspend(self, asleep: bool) -> None:
        """The replica keeps the running call but sends nothing while it is asleep, so the call's deadline waits too."""
        self.asleep = asleep
        if self.deadline is not None and not self.deadline.expired() and not self.is_cut:
            now = asyncio.get_running_loop().time()
            self.deadline.reschedule(None if asleep else now + self.chunk_timeout)

    def failed(self) -> None:
        """Counts a failed call. The replica gets no calls during the backoff."""
        self.target.failures += 1
        self.target.staged = None  # its commit may have failed
        seconds = FAILURE_BACKOFF.draw(self.target.failures)
        self.target.backoff_until = time.monotonic() + seconds
        call_after(seconds, self.on_capacity)

    def _ended(self, sequences: int, now: float) -> None:
        self.sequences -= sequences
        self.target.sequences -= sequences
        self.pace.change(-sequences, now)
        self.on_capacity()


def call_after(seconds: float, call: Callable[[], None]) -> None:
    """Calls once `seconds` have passed on time.monotonic(). (The loop's timers may fire early by the clock's resolution.)"""
    asyncio.get_running_loop().call_later(seconds + 0.01, call)
