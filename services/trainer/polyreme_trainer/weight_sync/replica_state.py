"""What the learner knows of one replica, and the record of a version that reached it.

Invariant: at most one call of a replica can be interrupted, the one that training waits for.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from polyreme.experience.leases import Lease
from polyreme_trainer.weight_sync.replica_client import ReplicaClient
from polyreme_trainer.weight_sync.version import Version

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """How a version reached a replica: `arena` (mapped, 0 bytes sent), `stream` (whole) or `delta`, and for a delta what it cost.

    `bytes`: sent by the trainer. `relayed_bytes`: sent by the replica `source`. `hops`: transfers from the trainer to this
    replica. `density`: fraction of the elements in a delta. `encode_seconds`: on the trainer. `apply_seconds`: on the replica,
    verification included. Of a version of several parts: see `total`.
    """

    path: str
    bytes: int = 0
    relayed_bytes: int | None = None
    hops: int | None = None
    source: str | None = None
    density: float | None = None
    encode_seconds: float | None = None
    apply_seconds: float | None = None


def total(parts: Sequence[Transfer], sizes: Sequence[int]) -> Transfer:
    """The transfer of a version from those of its parts, none of them mapped. Bytes and seconds are added.

    It is a `delta` if one part is. `density` is the mean over the parts by `sizes`, their bytes; a whole part has density 1.
    `hops` is the largest, and `source` has all names, separated by commas.
    """
    deltas = [part for part in parts if part.path == "delta"]
    relayed = [part.relayed_bytes for part in parts if part.relayed_bytes is not None]
    shares = [size * (1.0 if part.density is None else part.density) for part, size in zip(parts, sizes, strict=True)]
    return Transfer(
        "delta" if deltas else "stream",
        bytes=sum(part.bytes for part in parts),
        relayed_bytes=sum(relayed) if relayed else None,
        hops=max(part.hops or 0 for part in parts),
        source=", ".join(sorted({part.source for part in parts if part.source})) or None,
        density=sum(shares) / max(1, sum(sizes)) if deltas else None,
        encode_seconds=sum(part.encode_seconds or 0.0 for part in deltas) if deltas else None,
        apply_seconds=sum(part.apply_seconds or 0.0 for part in deltas) if deltas else None,
    )


@dataclass(frozen=True)
class Commit:
    """A replica has started to serve `version`. `stall_seconds`: pause of its generation; `reload_seconds`: the load within it.

    `canary_difference`: mean absolute difference of the replica's and learner's log-probabilities, in nats; None: not compared.
    """

    replica: str
    version: int
    term: int
    stall_seconds: float
    reload_seconds: float
    transfer: Transfer
    canary_difference: float | None = None


class InterruptedPushError(Exception):
    """Training needs the slot that the replica's push reads, or the replica's devices."""


class ReplicaState:
    """A replica with a lease: what it serves, its failures, and its running push."""

    def __init__(self, lease: Lease, client: ReplicaClient) -> None:
        self.lease, self.client = lease, client
        self.served: Version | None = None
        self.bases: dict[int, Version] = {}
        """By part: the served version if it came by stream, so that a delta may start from it."""
        self.commit: Commit | None = None
        self.swap_failures = self.reach_failures = 0
        self.last_error = "no push has completed yet"
        self.quarantined = False
        self.task: asyncio.Task[None] | None = None
        self.call: asyncio.Future[Any] | None = None
        self.streams = self.interrupted = self.relay_failed = False

    async def interruptibly(self, call: Awaitable[T]) -> T:
        """Awaits a call that training may interrupt. Raises InterruptedPushError, and what the call raises."""
        self.interrupted = False
        self.call = asyncio.ensure_future(call)
        try:
            return await self.call
        except asyncio.CancelledError:
            if self.interrupted:
                raise InterruptedPushError from None
            raise
        finally:
            self.call.cancel()

    def interrupt(self) -> None:
        if self.call:
            self.interrupted = self.call.cancel()
