"""Keeps every live replica at the newest version, each at its own pace.

Invariant:
- A replica is moved to the version that is the newest when its turn comes; versions in between are skipped. While a version is held
  for its evaluation, it replaces the newest one.
- A slot that a replica may still read is not given out for writing until the replica has moved on, cannot be reached, has lost its lease,
  or has blocked training beyond the deadline, which counts as a failed swap. (Digests then reject the overwritten bytes.) A stream
  that blocks training is interrupted much earlier, and restarted.
- A replica that cannot map the arena receives its versions by stream: see `streams`.
- A replica is quarantined after a bounded number of consecutive failures. One notice reports it, and no further push is attempted. What
  fails while the learner has the replicas' devices is no failure.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from polyreme import API_VERSION
from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.errors import RunFailedError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme.process.backoff import Backoff
from polyreme.weights.arena import Arena
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.deltas import Deltas
from polyreme_trainer.weight_sync.eval_hold import EvalHold
from polyreme_trainer.weight_sync.relay_plan import RelayPlan
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, SwapError, UnreachableError, Version, mapped_seconds
from polyreme_trainer.weight_sync.replica_state import Commit, InterruptedPushError, ReplicaState, Transfer
from polyreme_trainer.weight_sync.streams import Streams

LEASE_CHECK_INTERVAL = 0.25
SWAP_ATTEMPTS = 3
REACH_ATTEMPTS = 10  # about half a minute; a dead replica loses its lease earlier
BACKOFF = Backoff(first=0.2, longest=5.0)
CANCEL_RETRY_INTERVAL = 0.2
STREAM_INTERRUPT_TIMEOUT = 1.0  # training waits this long for a slot before it interrupts streams

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ReplicaSync:
    """The replicas that hold a lease. Runs on one event loop, during `follow`.

    Args:
        run, experience, registry: the run, by this loop's connection.
        arena: holds the versions.
        slots, deltas: of the arena.
        plan: who sends a version to whom.
        term: the learner's term.
        wanted: number of replicas that the run waits for.
        hold: the version that replicas are held at.
        security: of the replicas' ports.
    """

    def __init__(
        self,
        run: Run,
        experience: ExperienceLog,
        registry: Registry,
        arena: Arena,
        slots: ArenaSlots,
        deltas: Deltas,
        plan: RelayPlan,
        term: int,
        wanted: int,
        hold: EvalHold,
        security: SecurityConfig | None = None,
    ) -> None:
        self._security = security
        self._run, self._experience, self._registry, self._arena, self._term = run, experience, registry, arena, term
        self._wanted, self._hold = wanted, hold
        self._slots, self._deltas = slots, deltas
        self._streams = Streams(deltas, slots, plan, self._target, self._address, self._notice, self._notify)
        self._newest: Version | None = None
        self._devices_train = False
        self._replicas: dict[str, ReplicaState] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    async def follow(self) -> None:
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
                await self._wait_until(lambda: self._stopping or self._failed() or None, LEASE_CHECK_INTERVAL)
        finally:
            self._deltas.close()
            for replica in self._replicas.values():
                await self._stop(replica)

    def stop(self) -> None:
        """Makes `follow` return. Running pushes are cancelled."""
        self._stopping = True
        self._notify()

    def publish(self, version: Version) -> None:
        """Makes `version` the newest."""
        self._newest, self._slots.newest = version, version.slot
        self._deltas.publish(version, wanted=any(replica.client.unmapped for replica in self._replicas.values()))
        self._hold.published(version, time.monotonic())
        self._pin()

    async def set_devices_train(self, train: bool) -> None:
        """No push begins while colocated replicas have left their devices to the learner."""
        self._devices_train = train
        self._notify()

    async def _update_held_version(self) -> None:
        """Releases the held version when it was evaluated or held too long."""
        if self._hold.version is not None and self._newest is not None:
            self._hold.update(await self._experience.evaluated(), self._newest, time.monotonic())
            self._pin()

    def _pin(self) -> None:
        self._slots.pinned = self._hold.version.slot if self._hold.version else None
        self._notify()

    def _target(self) -> Version | None:
        """The version that replicas should serve; None while they have no devices."""
        return None if self._devices_train else self._hold.version or self._newest

    def _address(self, name: str) -> str | None:
        """The address of a live replica."""
        replica = self._replicas.get(name)
        return replica.lease.address if replica and not replica.quarantined else None

    async def acquire_slot(self, seconds: float) -> int:
        """A slot that no replica reads. After the deadline the replicas that block it are interrupted, which counts as a failed swap.

        The deadline is `seconds` plus the longest time of staging the newest version.
        """
        seconds += mapped_seconds(self._newest) if self._newest else 0.0
        slot = await self._wait_until(self._slots.free, min(seconds, STREAM_INTERRUPT_TIMEOUT))
        if slot is None:
            for name in self._slots.interruptible():
                logger.info("interrupting the stream to replica %s: training needs its slot", name)
                self._replicas[name].interrupt()
            slot = await self._wait_until(self._slots.free, max(0.0, seconds - STREAM_INTERRUPT_TIMEOUT))
        if slot is None:
            for name in self._slots.blocking_replicas():
                self._slots.drop(name)
                self._replicas[name].interrupt()
            slot = self._slots.free()
            assert slot is not None
        return slot

    async def wait_committed(self, version: int, replicas: int, seconds: float) -> list[Commit]:
        """The commits of at least `replicas` live replicas that serve `version` or a newer one.

        Raises:
            UnavailableError: fewer do at the deadline; the message names the state of each replica.
        """

        def there() -> list[Commit] | None:
            commits = [r.commit for r in self._replicas.values() if r.commit and r.commit.version >= version]
            return commits if len(commits) >= replicas else None

        commits = await self._wait_until(there, seconds)
        if commits is None:
            states = [
                f"{name} ({r.lease.address}) {f'serves version {r.commit.version}' if r.commit else 'serves no version'}: {r.last_error}"
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
                replica = ReplicaState(lease, ReplicaClient(lease, self._arena, self._security))
                self._replicas[name] = replica
                replica.task = asyncio.create_task(self._serve(replica), name=f"push to {name}")
                replica.task.add_done_callback(lambda _: self._notify())
                await self._notice(f"replica {name} at {lease.address} joined")

    async def _forget(self, name: str, replica: ReplicaState) -> None:
        await self._stop(replica)
        del self._replicas[name]
        self._streams.drop(name)
        self._notify()
        await self._notice(f"replica {name} at {replica.lease.address} left")

    async def _serve(self, replica: ReplicaState) -> None:
        """Keeps one replica at the target version."""
        while True:
            version = await self._wait_until(lambda: None if (target := self._target()) is replica.served else target)
            assert version is not None
            try:
                version, answer, transfer = await self._bring(replica, version)
            except InterruptedPushError:
                if replica.client.unmapped or self._devices_train:
                    continue
                if not await self._may_retry(replica, version, SwapError("it blocked a weight slot that training needs")):
                    return
                continue
            except (SwapError, UnreachableError) as error:
                if isinstance(error, UnreachableError):
                    self._slots.drop(replica.lease.id)
                    self._notify()
                if self._devices_train:
                    logger.info("replica %s: a push crossed the hand-over of its devices: %s", replica.lease.id, error)
                    continue
                if not await self._may_retry(replica, version, error):
                    return
                continue
            replica.swap_failures = replica.reach_failures = 0
            replica.last_error, replica.served = "none", version
            difference = answer.canary_difference if answer.HasField("canary_difference") else None
            stall, reload = answer.stall_seconds, answer.reload_seconds
            await self._record(replica, Commit(replica.lease.id, version.number, self._term, stall, reload, transfer, difference))

    async def _bring(self, replica: ReplicaState, version: Version) -> tuple[Version, pb.CommitResponse, Transfer]:
        """Moves a replica to `version`, or by stream to the target version."""
        name, client = replica.lease.id, replica.client
        if not client.probed:
            await client.probe(version)
        if not client.unmapped:
            self._slots.loading(name, version.slot)
            await replica.interruptibly(client.stage(version))
        if not client.unmapped:
            self._check_devices()
            answer = await replica.interruptibly(client.commit(version))
            self._slots.serving(name, version.slot)
            return version, answer, Transfer("arena")
        if not replica.streams:
            replica.streams = True
            await self._notice(f"replica {name} cannot map the weights and receives them by stream: {client.unmapped}")
        version, transfer = await self._streams.bring(replica, version)
        self._check_devices()
        answer = await client.commit(version)
        replica.streamed = version
        return version, answer, transfer

    def _check_devices(self) -> None:
        """Raises InterruptedPushError when the learner has taken the devices since the push began."""
        if self._devices_train:
            raise InterruptedPushError

    async def _may_retry(self, replica: ReplicaState, version: Version, error: SwapError | UnreachableError) -> bool:
        """Counts the failure and waits for the next attempt. False when the replica is quarantined instead."""
        reached = isinstance(error, SwapError)
        if reached:
            replica.swap_failures += 1
        else:
            replica.reach_failures += 1
        replica.last_error = f"version {version.number}: {error}"
        logger.warning("replica %s: %s", replica.lease.id, replica.last_error)
        if replica.client.unmapped and replica.reach_failures == 1 and not reached:
            await self._notice(f"the connection to replica {replica.lease.id} is broken, retrying: {replica.last_error}")
        if replica.swap_failures >= SWAP_ATTEMPTS or replica.reach_failures >= REACH_ATTEMPTS:
            await self._quarantine(
                replica, f"it failed {SWAP_ATTEMPTS if reached else REACH_ATTEMPTS} times; {replica.last_error}"
            )
            return False
        attempts = replica.swap_failures + replica.reach_failures
        await asyncio.sleep(BACKOFF.draw(attempts))
        return True

    async def _quarantine(self, replica: ReplicaState, reason: str) -> None:
        self._slots.drop(replica.lease.id)
        # Emit the notice first: quarantining the last replica fails the run.
        await self._notice(f"replica {replica.lease.id} at {replica.lease.address} is quarantined: {reason}")
        replica.quarantined, replica.last_error = True, f"quarantined: {reason}"
        self._streams.drop(replica.lease.id)
        self._notify()

    def _check_usable(self) -> None:
        """Fails a run whose replicas are all quarantined. A run with fewer replicas than it wants may still get another."""
        if len(self._replicas) >= self._wanted and all(replica.quarantined for replica in self._replicas.values()):
            raise RunFailedError(
                "a rollout replica that accepts weights",
                "; ".join(f"{name} {replica.last_error}" for name, replica in self._replicas.items()),
                "See the replicas' logs and fix the cause, then continue with --resume.",
            )

    async def _stop(self, replica: ReplicaState) -> None:
        self._slots.drop(replica.lease.id)
        task = replica.task
        while task is not None and not task.done():
            task.cancel()  # repeatedly: `wait_for` of Python 3.11, which redis uses, may lose a cancellation
            await asyncio.wait({task}, timeout=CANCEL_RETRY_INTERVAL)
        await replica.client.close()

    def _failed(self) -> "list[asyncio.Task[None]]":
        """The tasks that ended with an error."""
        tasks = [replica.task for replica in self._replicas.values() if replica.task and replica.task.done()]
        return [task for task in tasks if not task.cancelled() and task.exception()]

    async def _record(self, replica: ReplicaState, commit: Commit) -> None:
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
                **{key: value for key, value in asdict(commit.transfer).items() if value is not None},
                **({} if commit.canary_difference is None else {"canary_difference": commit.canary_difference}),
            }
        )
        replica.commit = commit
        self._notify()

    async def _notice(self, text: str) -> None:
        logger.info(text)
        await self._run.emit({"kind": "notice", "service": "learner", "text": text})

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, ready: Callable[[], T | None], seconds: float | None = None) -> T | None:
        """The result of `ready` once it is not None; None at the deadline."""
        try:
            async with asyncio.timeout(seconds):
                while (answer := ready()) is None:
                    await self._changed.wait()
                return answer
        except TimeoutError:
            return None
