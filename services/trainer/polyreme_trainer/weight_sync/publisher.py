"""A thread that pushes complete versions to the replicas while the learner trains.

Invariant: the learner's thread waits for a replica only in `acquire_slot` and `wait_committed`, each with a deadline. The
learner's next call raises an error of the thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

from polyreme.errors import PolyremeError, RunFailedError
from polyreme.experience.ledger import ExperienceLog, Term, TransitionError
from polyreme.experience.listing import attached
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme.weights.arena import Arena
from polyreme.weights.canary import Canary
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, RemotePart
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.deltas import Deltas
from polyreme_trainer.weight_sync.eval_hold import EvalHold
from polyreme_trainer.weight_sync.machine_part import MachinePart
from polyreme_trainer.weight_sync.part_source import PartSource
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import MakeClient, ReplicaClient
from polyreme_trainer.weight_sync.replica_state import Commit
from polyreme_trainer.weight_sync.replica_sync import ReplicaSync, SyncSettings
from polyreme_trainer.weight_sync.version import Version

START_TIMEOUT = 75.0  # Redis may be unreachable for a minute
CLOSE_TIMEOUT = 10.0
ANSWER_TIMEOUT = 90.0  # added to a request's own deadline: Redis may be unreachable for a minute

T = TypeVar("T")
logger = logging.getLogger(__name__)


class PublisherState(Enum):
    """NEW -- start --> CONNECTING -- connected --> RUNNING -- close --> CLOSED; CONNECTING, RUNNING -- error --> FAILED."""

    NEW = "not started"
    CONNECTING = "connecting to Redis"
    RUNNING = "pushing versions"
    FAILED = "failed: every call raises its first error"
    CLOSED = "closed"

    @property
    def final(self) -> bool:
        return self in (PublisherState.FAILED, PublisherState.CLOSED)


@dataclass(frozen=True)
class _Connected:
    """The thread's event loop and its replica sync."""

    loop: asyncio.AbstractEventLoop
    sync: ReplicaSync


class Publisher:
    """Pushes the newest version to every rollout replica with a lease, also to those that join later.

    It has its own event loop and Redis connection. `acquire_slot` and `wait_committed` are awaited in the caller's loop.

    A bug in it fails the run, as does the quarantine of every replica. The loss of the term or of Redis ends only this learner.

    Args:
        redis_url, run_id: the run.
        term: the learner's term.
        arena: this host's arena. The publisher reads it and does not close it.
        limits: None: those of a run.
        client: makes the client of a replica.
    """

    def __init__(
        self,
        redis_url: str,
        run_id: str,
        term: Term,
        arena: Arena,
        limits: PushLimits | None = None,
        client: MakeClient = ReplicaClient,
    ) -> None:
        self._client = client
        self._redis_url, self._run_id, self._term, self._arena = redis_url, run_id, term, arena
        self._limits = limits or PushLimits()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run_thread()), name="publisher", daemon=True)
        self._changed = threading.Condition()
        self._state = PublisherState.NEW
        self._connected: _Connected | None = None
        self._failure: BaseException | None = None

    @property
    def state(self) -> PublisherState:
        return self._state

    def start(self) -> None:
        """Starts the thread and waits for its connection. Raises StoreError, UnavailableError and TimeoutError unless it ends."""
        self._enter(PublisherState.CONNECTING)
        self._thread.start()
        if not self._wait_connected():
            raise TimeoutError(f"expected the publisher to connect within {START_TIMEOUT:g} s; found none of its answers")
        self._raise_failure()

    def publish(
        self, manifest: Manifest, slot: int, generation: int, canary: Canary | None = None, parts: tuple[RemotePart, ...] = ()
    ) -> None:
        """Makes the version in `slot` the newest. The publisher's thread computes missing digests. Replicas must pass its canary.

        Args:
            parts: the version's other parts, in the same slot of other machines.

        Raises:
            ArenaError: the slot is not complete at `generation`.
            StaleTermError: another learner has taken over.
        """
        self._arena.check(slot, generation)

        async def announce(sync: ReplicaSync) -> None:
            sealed = manifest if manifest.sealed else seal(manifest, self._arena.slot_view(slot))
            sync.publish(Version(sealed.to_proto(), slot, generation, canary.to_proto() if canary else None, parts))

        self._submit(announce).add_done_callback(self._keep_failure)

    async def acquire_slot(self, seconds: float) -> int:
        """A slot for the next version. Replicas that block every slot for `seconds` are interrupted: a failed swap for each.

        Raises:
            StaleTermError: another learner has taken over.
        """
        return await self._ask(lambda sync: sync.acquire_slot(seconds), seconds)

    async def wait_committed(self, version: int, replicas: int, seconds: float) -> list[Commit]:
        """The commits of at least `replicas` replicas that serve `version` or a newer one.

        Raises:
            UnavailableError: there are fewer after `seconds`; the message names the state of each replica.
            StaleTermError: another learner has taken over.
        """
        return await self._ask(lambda sync: sync.wait_committed(version, replicas, seconds), seconds)

    async def set_devices_train(self, train: bool) -> None:
        """Whether colocated replicas have left their devices to the learner, so that no push may begin."""
        await self._ask(lambda sync: sync.set_devices_train(train), 0.0)

    def close(self) -> None:
        """Ends the thread and cancels running pushes. Idempotent."""
        if not self._thread.is_alive():
            return
        self._wait_connected()
        if (connected := self._connected) is not None:
            with suppress(RuntimeError):  # the loop is closed already
                connected.loop.call_soon_threadsafe(connected.sync.stop)
        self._thread.join(CLOSE_TIMEOUT)

    def _enter(self, state: PublisherState, connected: _Connected | None = None, failure: BaseException | None = None) -> None:
        """Changes the state, in any thread. A final state stays, with its first failure."""
        with self._changed:
            if not self._state.final:
                self._state, self._failure = state, failure
                self._connected = connected or self._connected
                self._changed.notify_all()

    def _wait_connected(self) -> bool:
        """Waits until the thread has connected or ended. Returns whether it has, within START_TIMEOUT."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is not PublisherState.CONNECTING, START_TIMEOUT)

    async def _ask(self, request: Callable[[ReplicaSync], Coroutine[object, object, T]], seconds: float) -> T:
        """`request` has its own deadline of `seconds`. The deadline here covers a thread that ends without an answer."""
        try:
            async with asyncio.timeout(seconds + ANSWER_TIMEOUT):
                return await asyncio.wrap_future(self._submit(request))
        except (asyncio.CancelledError, TimeoutError):
            self._raise_failure()  # the publisher's loop has ended
            raise

    def _submit(self, request: Callable[[ReplicaSync], Coroutine[object, object, T]]) -> "Future[T]":
        self._raise_failure()
        if self._connected is None or self._state.final:
            raise RuntimeError(f"expected a publisher that is running; found one that is {self._state.value}")
        return asyncio.run_coroutine_threadsafe(request(self._connected.sync), self._connected.loop)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, PolyremeError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the publisher's thread has failed") from self._failure

    def _keep_failure(self, future: "Future[None]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._enter(PublisherState.FAILED, failure=error)

    async def _run_thread(self) -> None:
        try:
            async with attached(self._redis_url, self._run_id, self._limits.attach, RECONNECT_TIMEOUT) as run:
                await self._push_versions(run)
        except Exception as error:
            logger.error("the publisher failed", exc_info=error)
            self._enter(PublisherState.FAILED, failure=error)  # before the loop ends and cancels waiting requests
        else:
            self._enter(PublisherState.CLOSED)

    async def _push_versions(self, run: Run) -> None:
        config = await run.config()
        slots = ArenaSlots(self._arena.slots)
        parallel = config.trainer.parallel
        threads = min(parallel.world_size // parallel.copies, parallel.ranks_per_node)  # as many as ranks write a version here

        def part_source(number: int) -> PartSource:
            compare = partial(slots.compare, part=number)
            if number:
                return MachinePart(number, compare, self._limits, config.security)
            return Deltas(self._arena, config.weights.anchor_interval, threads, compare)

        settings = SyncSettings(
            term=self._term.counter,
            replicas=config.rollout.replicas,
            relay_roots=config.weights.relay_roots,
            hold=EvalHold(config.holds, config.eval_hold),
            security=config.security,
            announce=not config.ends_engines,
        )
        sync = ReplicaSync(
            run, ExperienceLog(run, self._term), self._arena, slots, part_source, settings, self._limits, self._client
        )
        self._enter(PublisherState.RUNNING, _Connected(asyncio.get_running_loop(), sync))
        try:
            await sync.run()
        except Exception as error:
            if isinstance(error, PolyremeError) and not isinstance(error, RunFailedError):
                raise
            # The learner may be waiting for samples that need this push. The run's failure ends its wait.
            reason = f"the weight publisher failed: {type(error).__name__}: {error}"
            with suppress(TransitionError):
                await run.set_state(RunState.FAILED, str(error) if isinstance(error, RunFailedError) else reason)
            raise
