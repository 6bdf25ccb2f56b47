"""Brings one part of a version to replicas: from its machine, or from a replica that has it.

Invariant:
- The machine sends to a bounded number of replicas at once. A stream of a version that is no longer the target does not begin,
  unless the replica holds the version's slot already.
- A delta that cannot be used is followed by the whole part, and a failed source by another. Neither counts against the replica.
- Every replica verifies what it receives against the trainer's manifest, also from a replica.
"""

import time
from asyncio import Semaphore
from collections.abc import Awaitable, Callable

from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.part_source import Offer, PartSource
from polyreme_trainer.weight_sync.relay_plan import Content, RelayPlan
from polyreme_trainer.weight_sync.replica_client import RelayError, Sent, SwapError
from polyreme_trainer.weight_sync.replica_state import ReplicaState, Transfer
from polyreme_trainer.weight_sync.version import Version

MAX_STREAMS = 8


class NewTargetError(Exception):
    """Replicas should serve a newer version than the one that was about to be sent."""


class PartStreams:
    """The streams of one part to all replicas. Runs on one event loop.

    Args:
        number: the part's number.
        source: sends the part.
        plan: decides who sends.
        slots: of the arenas; a slot that is streamed is held.
        target, address, notice: see `Streams`.
    """

    def __init__(
        self,
        number: int,
        source: PartSource,
        plan: RelayPlan,
        slots: ArenaSlots,
        target: Callable[[], Version | None],
        address: Callable[[str], str | None],
        notice: Callable[[str], Awaitable[None]],
    ) -> None:
        self.source = source
        self._number, self._plan, self._slots = number, plan, slots
        self._target, self._address, self._notice = target, address, notice
        self._turns = Semaphore(MAX_STREAMS)

    async def bring(self, replica: ReplicaState, version: Version) -> Transfer:
        """Makes the replica stage the part.

        Raises:
            NewTargetError: nothing of the version is being sent, and another one is the target.
            SwapError, UnreachableError, StaleTermError: see `ReplicaClient`.
        """
        name, transfer = replica.lease.id, None
        full: set[str] = set()
        try:
            while transfer is None:
                async with self._turns:
                    self._check_target(replica, version)
                    offer = await self.source.offer(replica.bases.get(self._number), version)
                    if offer.delta is None:
                        self._check_target(replica, version)  # its slot may have been given out meanwhile
                    content = Content(version.number, offer.delta.base_version if offer.delta else None)
                    source = self._plan.assign(name, content, time.monotonic(), full)
                    if source is None:
                        transfer = await self._send(replica, version, offer)
                if source is None:
                    continue
                try:
                    transfer = await self._relay(replica, version, offer, source)
                except RelayError as error:
                    if error.outcome == "full":
                        full.add(source)
                    elif error.outcome == "missing":
                        self._plan.missing(source, content)
                    else:
                        self._plan.failed(name, source, time.monotonic())
                        await self._report(replica, source, error)
        except BaseException:
            self._plan.forget(name)
            raise
        self._plan.completed(name)
        return transfer

    def drop(self, replica: str) -> None:
        """The replica has left, or is quarantined."""
        self._plan.drop(replica)

    def _check_target(self, replica: ReplicaState, version: Version) -> None:
        target = self._target()
        if target is not None and target is not version and replica.lease.id not in self._slots.readers(version.slot):
            raise NewTargetError

    async def _send(self, replica: ReplicaState, version: Version, offer: Offer) -> Transfer | None:
        """Sends from the part's machine. None: the delta could not be used."""
        if offer.delta is None:
            self._slots.streaming(replica.lease.id, version.slot)
            sent: Sent | None = await offer.send(replica.client)
        else:
            sent = await self._unless_unusable(replica, version, offer.send(replica.client))
        return _transfer(offer, sent, bytes=sent.nbytes, hops=1) if sent else None

    async def _relay(self, replica: ReplicaState, version: Version, offer: Offer, source: str) -> Transfer | None:
        """Lets the replica fetch from another one. None: the delta could not be used. Raises RelayError."""
        hops = self._plan.hops(replica.lease.id)
        address = self._address(source)
        if address is None:
            raise RelayError(f"replica {source} has left", "missing")
        relayed = replica.client.relay(offer.manifest, offer.delta, address)
        sent = await self._unless_unusable(replica, version, relayed) if offer.delta else await relayed
        return _transfer(offer, sent, relayed_bytes=sent.nbytes, hops=hops, source=source) if sent else None

    async def _unless_unusable(self, replica: ReplicaState, version: Version, sending: Awaitable[Sent]) -> Sent | None:
        """Awaits the sending of a delta. None: it could not be used, and the replica receives the whole part next."""
        try:
            return await sending
        except SwapError as error:
            self._check_target(replica, version)  # a machine drops deltas to older versions
            replica.bases.pop(self._number, None)
            title = f"version {version.number}" if not version.parts else f"part {self._number} of version {version.number}"
            await self._notice(f"replica {replica.lease.id} cannot use a delta and receives {title} whole: {error}")
            return None

    async def _report(self, replica: ReplicaState, source: str, error: RelayError) -> None:
        """One notice per replica."""
        if not replica.relay_failed:
            replica.relay_failed = True
            await self._notice(
                f"replica {replica.lease.id} could not fetch weights from replica {source} "
                f"and receives them from elsewhere: {error}"
            )


def _transfer(offer: Offer, sent: Sent, **received: int | str) -> Transfer:
    if offer.delta is None:
        return Transfer("stream", **received)  # type: ignore[arg-type]
    return Transfer(
        "delta",
        density=offer.delta.density,
        encode_seconds=offer.encode_seconds,
        apply_seconds=sent.apply_seconds,
        **received,  # type: ignore[arg-type]
    )
