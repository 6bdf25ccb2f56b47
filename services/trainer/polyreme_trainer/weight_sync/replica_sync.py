"""Every live replica follows the newest version, each at its own pace.

Kept here:
- Newest wins: a replica is moved to the newest version there is when its turn comes; versions in between are skipped. While a
  version is held for its evaluation, it takes the newest one's place.
- A slot that a replica may still read is not handed out for writing, until that replica has moved on, cannot be reached, lost its
  lease, or made training wait beyond the deadline, which counts as a failed swap. (What it then reads, its digests refuse.) A stream that keeps one from training is broken off much earlier, and begun anew.
- A replica that cannot map the arena gets its versions by stream for as long as it keeps its lease, a bounded number at once.
- A replica is given up after a bounded number of failures in a row, which is reported once, and then left alone.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from polyreme import API_VERSION
from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.errors import RunFailedError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme.weights.arena import Arena
from polyreme_trainer.weight_sync.arena_slots import Slots
from polyreme_trainer.weight_sync.eval_hold import Hold
from polyreme_trainer.weight_sync.replica_client import Link, SwapError, UnreachableError, Version, mapped_seconds

LEASES_SECONDS = 0.25
SWAP_ATTEMPTS = 3
REACH_ATTEMPTS = 10  # about half a minute: a replica that dies loses its lease earlier
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 5.0
CANCEL_SECONDS = 0.2
STREAMS = 8  # at once
STREAM_GRACE_SECONDS = 1.0  # that training waits for a slot before it breaks streams off

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """A replica serves `version` since now. Seconds that its generation stood still, and those of the reload proper."""

    replica: str
    version: int
    term: int
    stall_seconds: float
    reload_seconds: float


class _InterruptedError(Exception):
    """Training needs the slot that the replica's stream is read from."""


class _Replica:
    def __init__(self, lease: Lease, link: Link) -> None:
        self.lease, self.link = lease, link
        self.at: Version | None = None
        self.commit: Commit | None = None
        self.swap_failures = self.reach_failures = 0
        self.trouble = "it was not brought to a version yet"
        self.quarantined = False
        self.task: asyncio.Task[None] | None = None
        self.call: asyncio.Future[Any] | None = None
        self.streams = self.interrupted = False

    async def during(self, call: Awaitable[T]) -> T:
        """A call on the replica that training may interrupt. Raises _InterruptedError, and what the call does."""
        self.interrupted = False
        self.call = asyncio.ensure_future(call)
        try:
            return await self.call
        except asyncio.CancelledError:
            if self.interrupted:
                raise _InterruptedError from None
            raise
        finally:
            self.call.cancel()

    def interrupt(self) -> None:
        if self.call:
            self.interrupted = self.call.cancel()


class Fleet:
    """The replicas that hold a lease. Everything here runs on one event loop, in `follow`'s lifetime.

    Args:
        run, experience, registry: this loop's connection to the run.
        arena: where versions are.
        term: the learner's term.
        wanted: how many replicas the run waits for.
        hold: which versions replicas are kept at.
        security: of the replicas' ports.
    """

    def __init__(
        self,
        run: Run,
        experience: ExperienceLog,
        registry: Registry,
        arena: Arena,
        term: int,
        wanted: int,
        hold: Hold,
        security: SecurityConfig | None = None,
    ) -> None:
        self._security = security
        self._run, self._experience, self._registry, self._arena, self._term = run, experience, registry, arena, term
        self._wanted, self._hold = wanted, hold
        self._slots = Slots(arena.slots)
        self._streams = asyncio.Semaphore(STREAMS)
        self._newest: Version | None = None
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    async def follow(self) -> None:
        """Keeps the replicas up to date until `stop`.

        Raises:
            StaleTermError: a replica, or the log, knows a newer learner.
            RunFailedError: the run's replicas are all quarantined.
        """
        try:
            while not self._stopping:
                for task in self._ended():
                    task.result()  # raises what ended it
                # A server of another API number is the orchestrator's to complain of.
                leases = [lease for lease in await self._registry.leases("rollout") if lease.api == API_VERSION]
                await self._match({lease.id: lease for lease in leases})
                self._check_hope()
                await self._let_go()
                await self._until(lambda: self._stopping or self._ended() or None, LEASES_SECONDS)
        finally:
            for replica in self._replicas.values():
                await self._stop(replica)

    def stop(self) -> None:
        """Lets `follow` return. Pushes under way are cancelled."""
        self._stopping = True
        self._notify()

    def publish(self, version: Version) -> None:
        """Makes `version` the newest."""
        self._newest, self._slots.newest = version, version.slot
        self._hold.published(version, time.monotonic())
        self._keep()

    async def _let_go(self) -> None:
        """Of what is held, when it has been evaluated or had its time."""
        if self._hold.version is not None and self._newest is not None:
            self._hold.look(await self._experience.evaluated(), self._newest, time.monotonic())
            self._keep()

    def _keep(self) -> None:
        self._slots.kept = self._hold.version.slot if self._hold.version else None
        self._notify()

    def _target(self) -> Version | None:
        """What replicas shall serve."""
        return self._hold.version or self._newest

    async def acquire_slot(self, seconds: float) -> int:
        """A slot that no replica may be reading. Past the deadline the replicas in the way are interrupted, and their swaps have failed.

        The deadline is `seconds`, and the time that staging the newest version may take.
        """
        seconds += mapped_seconds(self._newest) if self._newest else 0.0
        slot = await self._until(self._slots.free, min(seconds, STREAM_GRACE_SECONDS))
        if slot is None:
            for name in self._slots.interruptible():
                log.info("the stream to replica %s is broken off: training needs its slot", name)
                self._replicas[name].interrupt()
            slot = await self._until(self._slots.free, max(0.0, seconds - STREAM_GRACE_SECONDS))
        if slot is None:
            for name in self._slots.laggards():
                self._slots.drop(name)
                self._replicas[name].interrupt()
            slot = self._slots.free()
            assert slot is not None
        return slot

    async def wait_committed(self, version: int, replicas: int, seconds: float) -> list[Commit]:
        """The commits of at least `replicas` live replicas that serve `version` or a newer one.

        Raises:
            UnavailableError: fewer do at the deadline; tells what each replica does.
        """

        def there() -> list[Commit] | None:
            commits = [r.commit for r in self._replicas.values() if r.commit and r.commit.version >= version]
            return commits if len(commits) >= replicas else None

        commits = await self._until(there, seconds)
        if commits is None:
            states = [
                f"{name} ({r.lease.address}) {f'serves version {r.commit.version}' if r.commit else 'has none'}: {r.trouble}"
                for name, r in self._replicas.items()
            ]
            raise UnavailableError(
                f"{replicas} replicas at version {version} within {seconds:g} s",
                "; ".join(states) or "no replica with a lease",
                "See the replicas' logs.",
            )
        return commits

    async def _match(self, leases: dict[str, Lease]) -> None:
        for name, replica in list(self._replicas.items()):
            if name not in leases or leases[name].address != replica.lease.address:
                await self._forget(name, replica)
        for name, lease in leases.items():
            if name not in self._replicas:
                replica = _Replica(lease, Link(lease, self._arena, self._security))
                self._replicas[name] = replica
                replica.task = asyncio.create_task(self._serve(replica), name=f"push to {name}")
                replica.task.add_done_callback(lambda _: self._notify())
                await self._notice(f"replica {name} at {lease.address} joined")

    async def _forget(self, name: str, replica: _Replica) -> None:
        await self._stop(replica)
        del self._replicas[name]
        self._notify()
        await self._notice(f"replica {name} at {replica.lease.address} left")

    async def _serve(self, replica: _Replica) -> None:
        """Moves one replica to whatever it shall serve, again and again."""
        while True:
            version = await self._until(lambda: None if (target := self._target()) is replica.at else target)
            assert version is not None
            try:
                version, answer = await self._bring(replica, version)
            except _InterruptedError:
                if replica.link.unmapped:
                    continue
                if not await self._patience(replica, version, SwapError("it kept a weight slot from training")):
                    return
                continue
            except (SwapError, UnreachableError) as error:
                if isinstance(error, UnreachableError):
                    self._slots.drop(replica.lease.id)
                    self._notify()
                if not await self._patience(replica, version, error):
                    return
                continue
            replica.swap_failures = replica.reach_failures = 0
            replica.trouble, replica.at = "none", version
            await self._record(
                replica, Commit(replica.lease.id, version.number, self._term, answer.stall_seconds, answer.reload_seconds)
            )

    async def _bring(self, replica: _Replica, version: Version) -> tuple[Version, pb.CommitResponse]:
        """Moves a replica to `version`, or to what it shall serve when the streams before its own are through."""
        name, link = replica.lease.id, replica.link
        if not link.probed:
            await link.probe(version)
        if not link.unmapped:
            self._slots.trying(name, version.slot)
            await replica.during(link.stage(version))
        if not link.unmapped:
            answer = await replica.during(link.commit(version))
            self._slots.served(name, version.slot)
            return version, answer
        if not replica.streams:
            replica.streams = True
            await self._notice(f"replica {name} cannot map the weights and gets them by stream: {link.unmapped}")
        async with self._streams:
            version = self._target() or version
            self._slots.streaming(name, version.slot)
            try:
                await replica.during(link.stream(version))
            finally:
                self._slots.drop(name)  # it has a copy of its own, also of the version before
                self._notify()
        return version, await link.commit(version)

    async def _patience(self, replica: _Replica, version: Version, error: SwapError | UnreachableError) -> bool:
        """Waits before the next attempt; False when there shall be none."""
        reached = isinstance(error, SwapError)
        if reached:
            replica.swap_failures += 1
        else:
            replica.reach_failures += 1
        replica.trouble = f"version {version.number}: {error}"
        log.warning("replica %s: %s", replica.lease.id, replica.trouble)
        if replica.link.unmapped and replica.reach_failures == 1 and not reached:
            await self._notice(f"the way to replica {replica.lease.id} is broken, it is tried again: {replica.trouble}")
        if replica.swap_failures >= SWAP_ATTEMPTS or replica.reach_failures >= REACH_ATTEMPTS:
            await self._quarantine(replica, f"it failed {SWAP_ATTEMPTS if reached else REACH_ATTEMPTS} times; {replica.trouble}")
            return False
        attempts = replica.swap_failures + replica.reach_failures
        backoff = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (attempts - 1))
        await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
        return True

    async def _quarantine(self, replica: _Replica, reason: str) -> None:
        self._slots.drop(replica.lease.id)
        # Told before it counts: the last one's quarantine ends the run, and with it whoever would still tell.
        await self._notice(f"replica {replica.lease.id} at {replica.lease.address} is quarantined: {reason}")
        replica.quarantined, replica.trouble = True, f"quarantined: {reason}"
        self._notify()

    def _check_hope(self) -> None:
        """A run whose replicas have all been given up cannot go on; one of fewer than it wants may yet get another."""
        if len(self._replicas) >= self._wanted and all(replica.quarantined for replica in self._replicas.values()):
            raise RunFailedError(
                "a rollout replica that takes weights",
                "; ".join(f"{name} {replica.trouble}" for name, replica in self._replicas.items()),
                "See the replicas' logs and mend the cause, then go on with --resume.",
            )

    async def _stop(self, replica: _Replica) -> None:
        self._slots.drop(replica.lease.id)
        task = replica.task
        while task is not None and not task.done():
            task.cancel()  # more than once: on Python 3.11 `wait_for`, which redis uses, may swallow a cancellation
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        await replica.link.close()

    def _ended(self) -> "list[asyncio.Task[None]]":
        """The tasks that an error has ended."""
        tasks = [replica.task for replica in self._replicas.values() if replica.task and replica.task.done()]
        return [task for task in tasks if not task.cancelled() and task.exception()]

    async def _record(self, replica: _Replica, commit: Commit) -> None:
        await self._experience.ack_commit(
            commit.replica, commit.version, commit.term, commit.stall_seconds, commit.reload_seconds
        )
        await self._run.emit(
            {
                "kind": "commit",
                "replica": commit.replica,
                "version": commit.version,
                "stall_seconds": commit.stall_seconds,
                "reload_seconds": commit.reload_seconds,
                "path": "stream" if replica.link.unmapped else "arena",
            }
        )
        replica.commit = commit
        self._notify()

    async def _notice(self, text: str) -> None:
        log.info(text)
        await self._run.emit({"kind": "notice", "service": "learner", "text": text})

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], T | None], seconds: float | None = None) -> T | None:
        """What `ready` answers as soon as that is not None; None at the deadline."""
        try:
            async with asyncio.timeout(seconds):
                while (answer := ready()) is None:
                    await self._changed.wait()
                return answer
        except TimeoutError:
            return None
