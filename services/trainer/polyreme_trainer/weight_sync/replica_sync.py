"""Which replicas there are, which version they should serve, and which arena slot training may write next.

Invariant:
- Every live replica has one task that keeps it at the target version, each at its own pace: see `replica_push`. The target is the
  newest version; while a version is held for its evaluation, it replaces the newest one.
- A slot that a replica may still read is not given out for writing until the replica has moved on, cannot be reached, has lost
  its lease, or has blocked training beyond the deadline, which counts as a failed swap. (Digests then reject the overwritten
  bytes.) A stream that blocks training is interrupted much earlier, and restarted.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from polyreme import API_VERSION
from polyreme.config.security import SecurityConfig
from polyreme.errors import RunFailedError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.run import Run
from polyreme.weights.arena import Arena
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.change_signal import ChangeSignal
from polyreme_trainer.weight_sync.eval_hold import EvalHold
from polyreme_trainer.weight_sync.part_source import PartSource
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import MakeClient
from polyreme_trainer.weight_sync.replica_push import ReplicaPush
from polyreme_trainer.weight_sync.replica_state import Commit, ReplicaState
from polyreme_trainer.weight_sync.streams import Streams
from polyreme_trainer.weight_sync.version import Version

CANCEL_RETRY_INTERVAL = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """What a run says about its replicas.

    Attributes:
        term: the learner's term.
        replicas: the number of replicas that the run waits for.
        relay_roots: see `Streams`.
        hold: the version that replicas are held at.
        security: of the replicas' ports.
        announce: whether the run is told who joins and who leaves. Otherwise only the log has it, since engines that end for the
            learner (`rollout.cpu_sleep: end`) leave and join in every turn.
    """

    term: int
    replicas: int
    relay_roots: int
    hold: EvalHold
    security: SecurityConfig | None
    announce: bool


class ReplicaSync:
    """The replicas that hold a lease. Runs on one event loop, during `run`.

    Args:
        run, experience: the run, by this loop's connection.
        arena: holds the versions.
        slots: of the arena.
        part_source: see `Streams`.
        settings: of the run.
        limits: of pushes.
        client: makes the client of a replica.
    """

    def __init__(
        self,
        run: Run,
        experience: ExperienceLog,
        arena: Arena,
        slots: ArenaSlots,
        part_source: Callable[[int], PartSource],
        settings: SyncSettings,
        limits: PushLimits,
        client: MakeClient,
    ) -> None:
        self._client = client
        self._run, self._experience, self._registry, self._arena = run, experience, Registry(run), arena
        self._settings, self._hold, self._limits = settings, settings.hold, limits
        self._slots = slots
        self._changes = ChangeSignal()
        self._newest: Version | None = None
        self._devices_train = False
        self.replicas: dict[str, ReplicaState] = {}
        self._stopping = False
        self._streams = Streams(
            part_source, settings.relay_roots, slots, self._target, self._address, self._notice, self._changes.notify, limits
        )
        self._push = ReplicaPush(
            experience,
            slots,
            self._streams,
            settings.term,
            self._target,
            lambda: self._devices_train,
            self._notice,
            self._changes,
            limits,
        )

    async def run(self) -> None:
        """Keeps the replicas up to date until `stop`.

        Raises:
            StaleTermError: a replica, or the log, knows a newer learner.
            RunFailedError: all replicas of the run are quarantined.
        """
        try:
            while not self._stopping:
                for task in self._failed():
                    task.result()  # raises its error
                # The orchestrator reports servers with another API version.
                leases = [lease for lease in await self._registry.leases("rollout") if lease.api == API_VERSION]
                await self._match({lease.id: lease for lease in leases})
                self._check_usable()
                await self._update_held_version()
                await self._changes.wait_until(lambda: self._stopping or self._failed() or None, self._limits.lease_check)
        finally:
            for replica in self.replicas.values():
                await self._stop(replica)
            self._streams.close()

    def stop(self) -> None:
        """Makes `run` return. Running pushes are cancelled."""
        self._stopping = True
        self._changes.notify()

    def publish(self, version: Version) -> None:
        """Makes `version` the newest."""
        self._newest, self._slots.newest = version, version.slot
        self._streams.publish(version, wanted=any(replica.client.unmapped for replica in self.replicas.values()))
        self._hold.published(version, time.monotonic())
        self._pin()

    async def set_devices_train(self, train: bool) -> None:
        """No push begins while colocated replicas have left their devices to the learner."""
        self._devices_train = train
        self._changes.notify()

    async def _update_held_version(self) -> None:
        """Releases the held version when it was evaluated or held too long."""
        if self._hold.version is not None and self._newest is not None:
            self._hold.update(await self._experience.evaluated(), self._newest, time.monotonic())
            self._pin()

    def _pin(self) -> None:
        self._slots.pinned = self._hold.version.slot if self._hold.version else None
        self._changes.notify()

    def _target(self) -> Version | None:
        """The version that replicas should serve; None while they have no devices."""
        return None if self._devices_train else self._hold.version or self._newest

    def _address(self, name: str) -> str | None:
        """The address of a live replica."""
        replica = self.replicas.get(name)
        return replica.lease.address if replica and not replica.quarantined else None

    async def acquire_slot(self, seconds: float) -> int:
        """A slot that no replica reads. After the deadline replicas that block it are interrupted, which counts as a failed swap.

        The deadline is `seconds` plus the longest time of staging the newest version.
        """
        seconds += self._limits.memory_seconds(self._newest.nbytes) if self._newest else 0.0
        first = min(seconds, self._limits.stream_interrupt)
        slot = await self._changes.wait_until(self._slots.free, first)
        if slot is None:
            for name in self._slots.interruptible():
                logger.info("interrupting the stream to replica %s: training needs its slot", name)
                self.replicas[name].interrupt()
            slot = await self._changes.wait_until(self._slots.free, seconds - first)
        if slot is None:
            for name in self._slots.blocking_replicas():
                self._slots.drop(name)
                self.replicas[name].interrupt()
            slot = self._slots.free()
            assert slot is not None
        return slot

    async def wait_committed(self, version: int, replicas: int, seconds: float) -> list[Commit]:
        """The commits of at least `replicas` live replicas that serve `version` or a newer one.

        Raises:
            UnavailableError: fewer do at the deadline; the message names the state of each replica.
        """

        def there() -> list[Commit] | None:
            commits = [r.commit for r in self.replicas.values() if r.commit and r.commit.version >= version]
            return commits if len(commits) >= replicas else None

        commits = await self._changes.wait_until(there, seconds)
        if commits is None:
            states = [
                f"{name} ({r.lease.address}) {f'serves version {r.commit.version}' if r.commit else 'serves no version'}: "
                f"{r.last_error}"
                for name, r in self.replicas.items()
            ]
            raise UnavailableError(
                f"{replicas} replicas at version {version} within {seconds:g} s",
                "; ".join(states) or "no replica with a lease",
                "See the replicas' logs.",
            )
        return commits

    async def _match(self, leases: dict[str, Lease]) -> None:
        for name, replica in list(self.replicas.items()):
            if name not in leases or leases[name].address != replica.lease.address:
                await self._forget(name, replica)
        for name, lease in leases.items():
            if name not in self.replicas:
                replica = ReplicaState(lease, self._client(lease, self._arena, self._settings.security, self._limits))
                self.replicas[name] = replica
                replica.task = asyncio.create_task(self._push.keep_current(replica), name=f"push to {name}")
                replica.task.add_done_callback(lambda _: self._changes.notify())
                await self._report_membership(f"replica {name} at {lease.address} joined")

    async def _forget(self, name: str, replica: ReplicaState) -> None:
        await self._stop(replica)
        del self.replicas[name]
        self._streams.drop(name)
        self._changes.notify()
        await self._report_membership(f"replica {name} at {replica.lease.address} left")

    def _check_usable(self) -> None:
        """Fails a run whose replicas are all quarantined. A run with fewer replicas than it wants may still get another."""
        if len(self.replicas) >= self._settings.replicas and all(replica.quarantined for replica in self.replicas.values()):
            raise RunFailedError(
                "a rollout replica that accepts weights",
                "; ".join(f"{name} {replica.last_error}" for name, replica in self.replicas.items()),
                "See the replicas' logs and fix the cause, then continue with --resume.",
            )

    async def _stop(self, replica: ReplicaState) -> None:
        task = replica.task
        while task is not None and not task.done():
            task.cancel()  # repeatedly: `wait_for` of Python 3.11, which redis uses, may lose a cancellation
            await asyncio.wait({task}, timeout=CANCEL_RETRY_INTERVAL)
        self._slots.drop(replica.lease.id)  # now, since a push whose cancellation was lost may have taken a slot
        await replica.client.close()

    def _failed(self) -> "list[asyncio.Task[None]]":
        """The tasks that ended with an error."""
        tasks = [replica.task for replica in self.replicas.values() if replica.task and replica.task.done()]
        return [task for task in tasks if not task.cancelled() and task.exception()]

    async def _report_membership(self, text: str) -> None:
        if self._settings.announce:
            await self._notice(text)
        else:
            logger.info(text)

    async def _notice(self, text: str) -> None:
        logger.info(text)
        await self._run.emit(ServiceNotice(service="learner", text=text))
