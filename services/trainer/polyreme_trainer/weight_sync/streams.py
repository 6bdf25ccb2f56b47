"""Brings versions to replicas that cannot map the arena: as deltas where there are any, else whole; from the trainer, or from a replica.

Invariant:
- The trainer streams to a bounded number of replicas at once. A stream takes the target version at its own start.
- A refused delta is followed by the whole version, and a failed source by another one. Neither counts against the replica.
- A version of several parts goes to every replica whole, each part from the machine that holds it.
- Every replica verifies what it receives against the trainer's manifest, also from a replica.
"""

import asyncio
import time
from asyncio import Semaphore
from collections.abc import Awaitable, Callable

from polyreme.weights.delta import WeightDelta
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.deltas import Deltas, EncodedDelta
from polyreme_trainer.weight_sync.relay_plan import Content, RelayPlan
from polyreme_trainer.weight_sync.replica_client import RelayError, Sent, SwapError, Version
from polyreme_trainer.weight_sync.replica_state import ReplicaState, Transfer

MAX_STREAMS = 8


class Streams:
    """The streams to all replicas. Runs on one event loop.

    Args:
        deltas, slots: of the arena.
        plan: decides who sends.
        target: the version that replicas should serve.
        address: of a live replica's gRPC server, by the replica's name; None when it has left.
        notice: reports to the run.
        changed: called when a slot may have become free.
    """

    def __init__(
        self,
        deltas: Deltas,
        slots: ArenaSlots,
        plan: RelayPlan,
        target: Callable[[], Version | None],
        address: Callable[[str], str | None],
        notice: Callable[[str], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._deltas, self._slots, self._plan = deltas, slots, plan
        self._target, self._address, self._notice, self._changed = target, address, notice, changed
        self._turns = Semaphore(MAX_STREAMS)

    async def bring(self, replica: ReplicaState, version: Version) -> tuple[Version, Transfer]:
        """Makes the replica stage the target version; `version` where there is none.

        Raises:
            SwapError, UnreachableError, StaleTermError: see `ReplicaClient`.
            InterruptedPushError: training needs the slot.
        """
        name, transfer = replica.lease.id, None
        full: set[str] = set()
        try:
            while transfer is None:
                async with self._turns:
                    version = self._target() or version
                    if version.parts:
                        return version, await self._send_parts(replica, version)
                    encoded = await self._deltas.between(replica.streamed, version) if replica.streamed else None
                    base = replica.streamed.number if replica.streamed and encoded else None
                    content = Content(version.number, base)
                    source = self._plan.assign(name, content, time.monotonic(), full)
                    if source is None:
                        transfer = await self._send(replica, version, encoded)
                if source is None:
                    continue
                try:
                    transfer = await self._relay(replica, version, encoded, source)
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
        return version, transfer

    def drop(self, replica: str) -> None:
        """The replica has left, or is quarantined."""
        self._plan.drop(replica)

    async def _send(self, replica: ReplicaState, version: Version, encoded: EncodedDelta | None) -> Transfer | None:
        """Sends from the arena. None: the replica refused the delta."""
        if encoded is not None:
            sent = await self._unless_refused(replica, version, replica.client.stream_delta(encoded.delta, version))
            return _delta(encoded, sent, bytes=sent.nbytes, hops=1) if sent else None
        self._slots.streaming(replica.lease.id, version.slot)
        try:
            sent = await replica.interruptibly(replica.client.stream(version))
        finally:
            self._slots.drop(replica.lease.id)  # it has its own copy, also of the previous version
            self._changed()
        return Transfer("stream", sent.nbytes, hops=1)

    async def _send_parts(self, replica: ReplicaState, version: Version) -> Transfer:
        """Sends part 0 from the arena while the replica fetches the others. The slot, on every machine, is not written meanwhile."""

        async def send() -> Transfer:
            client = replica.client
            sending = [client.stream(version), *(client.fetch_part(version, part) for part in version.parts)]
            tasks = [asyncio.ensure_future(each) for each in sending]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and (
                    error := task.exception()
                ):  # it has cancelled the others, which share its connection
                    raise error
            return Transfer("stream", sum(task.result().nbytes for task in tasks), hops=1)

        self._slots.streaming(replica.lease.id, version.slot)
        try:
            return await replica.interruptibly(send())
        finally:
            self._slots.drop(replica.lease.id)
            self._changed()

    async def _relay(self, replica: ReplicaState, version: Version, encoded: EncodedDelta | None, source: str) -> Transfer | None:
        """Lets the replica fetch from another one. None: it refused the delta. Raises RelayError."""
        hops = self._plan.hops(replica.lease.id)
        delta: WeightDelta | None = encoded.delta if encoded else None
        address = self._address(source)
        if address is None:
            raise RelayError(f"replica {source} has left", "missing")
        relayed = replica.client.relay(version, delta, address)
        sent = await self._unless_refused(replica, version, relayed) if delta else await relayed
        if sent is None:
            return None
        if encoded is not None:
            return _delta(encoded, sent, relayed_bytes=sent.nbytes, hops=hops, source=source)
        return Transfer("stream", relayed_bytes=sent.nbytes, hops=hops, source=source)

    async def _unless_refused(self, replica: ReplicaState, version: Version, sending: Awaitable[Sent]) -> Sent | None:
        """Awaits the sending of a delta. None: the replica refused it, and receives the whole version next."""
        try:
            return await sending
        except SwapError as error:
            replica.streamed = None
            await self._notice(f"replica {replica.lease.id} refused a delta and receives version {version.number} whole: {error}")
            return None

    async def _report(self, replica: ReplicaState, source: str, error: RelayError) -> None:
        """One notice per replica."""
        if not replica.relay_failed:
            replica.relay_failed = True
            await self._notice(
                f"replica {replica.lease.id} could not fetch weights from replica {source} and receives them from elsewhere: {error}"
            )


def _delta(encoded: EncodedDelta, sent: Sent, **received: int | str) -> Transfer:
    return Transfer(
        "delta",
        density=encoded.delta.manifest.density,
        encode_seconds=encoded.seconds,
        apply_seconds=sent.apply_seconds,
        **received,  # type: ignore[arg-type]
    )
