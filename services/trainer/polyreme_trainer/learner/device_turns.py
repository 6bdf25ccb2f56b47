"""The learner's turns on devices that it shares with the replicas, see polyreme.experience.device_lease.

Invariant: all ranks hold the devices, or none does. Rank 0's thread renews the grant while the ranks compute; an ended grant is
reported at the next call, before anything trained without it is published. With separate devices every call returns at once.
"""

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Self, TypeVar

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError, StoreError, UnavailableError
from polyreme.experience.device_lease import TTL, DeviceLease
from polyreme.experience.leases import Registry
from polyreme.experience.listing import attached
from polyreme.experience.run import Run, RunState
from polyreme.experience.scripts import StaleGrantError
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.run_client import DrainError

ATTACH_TIMEOUT = 60.0
START_TIMEOUT = 75.0  # Redis may be unreachable for a minute
CLOSE_TIMEOUT = 10.0

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LearnerTurns:
    """One rank's side, inside of its `with` block, in which rank 0's thread is connected. Every method is collective.

    Args:
        config: the run's configuration.
        redis_url, run_id: where rank 0 finds the run.
        ranks: the ranks of this learner.

    Attributes:
        shared: whether the devices are shared, so that there are turns.
        held: whether the ranks may use the devices.
    """

    def __init__(self, config: RunConfig, redis_url: str, run_id: str, ranks: Ranks) -> None:
        self.shared = config.placement == "colocated"
        self.held = not self.shared
        self._ranks = ranks
        self._thread = LeaseThread(config, redis_url, run_id) if self.shared and ranks.leads else None

    def __enter__(self) -> Self:
        """Raises StoreError, UnavailableError."""
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends rank 0's thread. Not collective. Idempotent.

        Devices that ranks still hold are not released, since this learner still has their memory. A grant ends at its deadline.
        """
        if self._thread is not None:
            self._thread.close(give_up=not self.held)

    def take(self) -> bool:
        """Waits for the devices. Returns whether they have changed hands; False when the ranks already held them.

        Raises:
            UnavailableError: the replicas did not leave the devices within rollout.start_timeout.
            RunFailedError: the run has failed.
        """
        if self.held:
            return False
        self._ranks.on_leader(lambda: self._lease.take())
        self.held = True
        return True

    def give_up(self) -> bool:
        """Gives the devices to the replicas. Returns whether the devices have changed hands."""
        if not (self.shared and self.held):
            return False
        self._ranks.on_leader(lambda: self._lease.give_up())
        self.held = False
        return True

    async def check(self) -> None:
        """Raises StaleGrantError when the grant has ended although the ranks used the devices. On rank 0."""
        if self.shared:
            await self._lease.check()

    @property
    def _lease(self) -> "LeaseThread":
        assert self._thread is not None, "on rank 0 of a colocated run"
        return self._thread


class LeaseThread:
    """The device lease, with a thread that renews it. The caller awaits the methods in its own event loop."""

    def __init__(self, config: RunConfig, redis_url: str, run_id: str) -> None:
        self._config, self._redis_url, self._run_id = config, redis_url, run_id
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="device lease", daemon=True)
        self._running: Future[asyncio.AbstractEventLoop] = Future()
        self._lost: StaleGrantError | None = None
        self._gives_up = False
        self._stop: asyncio.Event
        self._run: Run
        self._lease: DeviceLease

    def start(self) -> None:
        """Starts the thread and waits until it has connected. Raises StoreError, UnavailableError."""
        self._thread.start()
        self._running.result(START_TIMEOUT)

    async def take(self) -> None:
        await self._ask(self._take())

    async def give_up(self) -> None:
        await self.check()
        await self._ask(self._lease.give_up())

    async def check(self) -> None:
        """Renews the grant. Raises StaleGrantError, now and at every later call, when it has ended."""
        await self._ask(self._renewed())

    def close(self, give_up: bool) -> None:
        """Ends the thread. Idempotent. `give_up`: end a grant or a claim now; otherwise it ends at its deadline."""
        if self._thread.is_alive():
            self._gives_up = give_up
            with suppress(RuntimeError):  # the loop is closed already
                self._running.result(START_TIMEOUT).call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_TIMEOUT)

    async def _ask(self, request: Coroutine[object, object, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._running.result(0)))

    async def _take(self) -> None:
        limit, began = self._config.rollout.start_timeout, time.perf_counter()
        if await self._run.check() is RunState.STARTING:
            await self._wait_for_replicas(limit)  # an engine needs the devices while it starts
        await self._lease.acquire(limit, self._run.check)
        logger.debug("took the devices after %.3f s", time.perf_counter() - began)

    async def _renewed(self) -> None:
        if self._lost is None:
            try:
                await self._lease.renew()
            except StaleGrantError as error:
                self._lost = error
        if self._lost is not None:
            raise self._lost

    async def _wait_for_replicas(self, seconds: float) -> None:
        wanted, registry = self._config.rollout.replicas, Registry(self._run)

        async def there() -> int | None:
            if await self._run.check() is not RunState.STARTING:
                raise DrainError("replicas that start before the learner")
            count = len(await registry.leases("rollout"))
            return count if count >= wanted else None

        if await self._run.until(there, within=seconds) is None:
            raise UnavailableError(
                f"{wanted} replicas within rollout.start_timeout = {seconds:g} s",
                f"{len(await registry.leases('rollout'))} with a lease",
                "See the replicas' logs.",
            )

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        try:
            async with attached(self._redis_url, self._run_id, ATTACH_TIMEOUT, RECONNECT_TIMEOUT) as self._run:
                self._lease = DeviceLease(self._run, "train", f"learner-{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
                self._running.set_result(asyncio.get_running_loop())
                await self._renew()
                if self._gives_up:
                    with suppress(StoreError):
                        await self._lease.give_up()
        except PolyremeError as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    async def _renew(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TTL / 3):
                    await self._stop.wait()
            try:
                await self._renewed()
            except StaleGrantError as error:
                logger.error("%s", error)
                await self._stop.wait()  # the learner's next call raises it
            except StoreError as error:
                logger.warning("the grant of the devices could not be renewed: %s", error)
