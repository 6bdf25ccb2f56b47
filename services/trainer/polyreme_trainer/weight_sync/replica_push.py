"""Keeps one replica at the target version: brings it there, records its commits, and retries what failed.

Invariant:
- A replica is moved to the version that is the target when its turn comes; versions in between are skipped.
- A replica is quarantined after a bounded number of consecutive failures. One notice reports it, and no further push is
  attempted. What fails while the learner has the replicas' devices is no failure.
- A replica that cannot map the arena receives its versions by stream: see `streams`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.metric_records import VersionServed
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.change_signal import ChangeSignal
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import SwapError, UnreachableError
from polyreme_trainer.weight_sync.replica_state import Commit, InterruptedPushError, ReplicaState, Transfer
from polyreme_trainer.weight_sync.streams import Streams
from polyreme_trainer.weight_sync.version import Version

logger = logging.getLogger(__name__)


class ReplicaPush:
    """The pushes to all replicas, one task each. Runs on one event loop.

    Args:
        experience: the run's log, in which commits are recorded.
        slots: of the arena.
        streams: to replicas that cannot map the arena.
        term: the learner's term.
        target: the version that replicas should serve; None while they have no devices.
        devices_train: whether the learner has the replicas' devices.
        notice: reports to the run.
        changes: notified after every change of a replica.
        limits: of pushes.
    """

    def __init__(
        self,
        experience: ExperienceLog,
        slots: ArenaSlots,
        streams: Streams,
        term: int,
        target: Callable[[], Version | None],
        devices_train: Callable[[], bool],
        notice: Callable[[str], Awaitable[None]],
        changes: ChangeSignal,
        limits: PushLimits,
    ) -> None:
        self._experience, self._slots, self._streams, self._term = experience, slots, streams, term
        self._target, self._devices_train, self._notice, self._changes = target, devices_train, notice, changes
        self._limits = limits

    async def keep_current(self, replica: ReplicaState) -> None:
        """Keeps one replica at the target version, until it is quarantined.

        Raises:
            StaleTermError: the replica, or the log, knows a newer learner.
        """
        while True:
            version = await self._changes.wait_until(lambda: None if (target := self._target()) is replica.served else target)
            assert version is not None
            try:
                version, answer, transfer = await self._bring(replica, version)
            except InterruptedPushError:
                if replica.client.unmapped or self._devices_train():
                    continue
                if not await self._may_retry(replica, version, SwapError("it blocked a weight slot that training needs")):
                    return
                continue
            except (SwapError, UnreachableError) as error:
                if isinstance(error, UnreachableError):
                    self._slots.drop(replica.lease.id)
                    self._changes.notify()
                if self._devices_train():
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
            answer = await replica.interruptibly(self._commit(replica, version))
            self._slots.serving(name, version.slot)
            return version, answer, Transfer("arena")
        if not replica.streams:
            replica.streams = True
            await self._notice(f"replica {name} cannot map the weights and receives them by stream: {client.unmapped}")
        version, transfer = await self._streams.bring(replica, version)
        self._check_devices()
        answer = await self._commit(replica, version)
        replica.bases = dict.fromkeys(range(version.manifest.parts), version)
        return version, answer, transfer

    async def _commit(self, replica: ReplicaState, version: Version) -> pb.CommitResponse:
        """Makes the replica serve the staged version. The orchestrator's calls may arrive there meanwhile, and wait for it."""
        await self._experience.ack_stage(replica.lease.id, version.number, self._term)
        return await replica.client.commit(version)

    def _check_devices(self) -> None:
        """Raises InterruptedPushError when the learner has taken the devices since the push began."""
        if self._devices_train():
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
            await self._notice(f"replica {replica.lease.id} has not received its weights, retrying: {replica.last_error}")
        limits = self._limits
        if replica.swap_failures >= limits.swap_attempts or replica.reach_failures >= limits.reach_attempts:
            attempts = limits.swap_attempts if reached else limits.reach_attempts
            await self._quarantine(replica, f"it failed {attempts} times; {replica.last_error}")
            return False
        attempts = replica.swap_failures + replica.reach_failures
        await asyncio.sleep(limits.backoff.draw(attempts))
        return True

    async def _quarantine(self, replica: ReplicaState, reason: str) -> None:
        self._slots.drop(replica.lease.id)
        # Emit the notice first: quarantining the last replica fails the run.
        await self._notice(f"replica {replica.lease.id} at {replica.lease.address} is quarantined: {reason}")
        replica.quarantined, replica.last_error = True, f"quarantined: {reason}"
        self._streams.drop(replica.lease.id)
        self._changes.notify()

    async def _record(self, replica: ReplicaState, commit: Commit) -> None:
        await self._experience.ack_commit(
            commit.replica, commit.version, commit.term, commit.stall_seconds, commit.reload_seconds
        )
        await self._experience.run.emit(
            VersionServed(
                replica=commit.replica,
                version=commit.version,
                metrics={
                    "stall_seconds": commit.stall_seconds,
                    "reload_seconds": commit.reload_seconds,
                    **{key: value for key, value in asdict(commit.transfer).items() if value is not None},
                    **({} if commit.canary_difference is None else {"canary_difference": commit.canary_difference}),
                },
            )
        )
        replica.commit = commit
        self._changes.notify()
