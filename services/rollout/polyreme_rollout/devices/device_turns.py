"""A colocated replica's turns: it samples while it holds the devices, and sleeps while the learner trains on them.

Invariant: between the end of a grant and the next one the engine samples nothing and has left the devices. What runs then is kept
and continues later, unless the new grant has ended too. Memory comes back in this order: weights, new version, key-value cache.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from polyreme.errors import StoreError
from polyreme.experience.device_lease import DeviceLease, Grant
from polyreme_rollout.engine.protocol import InferenceEngine, Slept
from polyreme_rollout.generation.running import RunningSequences
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.weights.weight_swap import WeightSwapper

PUSH_TIMEOUT = 60.0
"""Seconds that a woken engine waits for the version that the learner has announced."""

logger = logging.getLogger(__name__)


class ReplicaTurns:
    """Makes the engine of a replica leave the devices when the learner wants them, and return when they are granted again.

    Args:
        lease: the device lease, which has a grant, and without which the swapper does not continue sampling.
        engine, swapper, running, metrics: parts of the replica. The engine is awake.
        on_change: called when a turn has begun, since the served version may be lost.
        retry_seconds: pause while Redis cannot be reached.
    """

    def __init__(
        self,
        lease: DeviceLease,
        engine: InferenceEngine,
        swapper: WeightSwapper,
        running: RunningSequences,
        metrics: ReplicaMetrics,
        on_change: Callable[[], Awaitable[None]],
        retry_seconds: float = 0.5,
    ) -> None:
        self._on_change, self._retry_seconds = on_change, retry_seconds
        self._lease, self._engine, self._swapper = lease, engine, swapper
        self._running, self._metrics = running, metrics

    async def take_turns(self) -> None:
        """Takes turns until it is cancelled. Raises EngineDeadError."""
        holding = asyncio.ensure_future(self._lease.hold())
        try:
            while True:
                await holding
                slept, grant = await self._step_aside()
                holding = asyncio.ensure_future(self._lease.hold())
                await self._wait_for_version(grant, holding)
                await self._swapper.resume_if_paused(slept.weights)  # no-op once the grant has ended
                await self._on_change()
        finally:
            holding.cancel()

    async def _step_aside(self) -> tuple[Slept, Grant]:
        """Leaves the devices, waits until they are granted again, and takes back the memory of the weights."""
        if not self._lease.usable:
            await self._engine.pause()  # before `paused_for_devices`, which waits for a running swap
        async with AsyncExitStack() as rest:
            await self._lease.renew_during(rest.enter_async_context(self._swapper.paused_for_devices()))
            started, running = time.perf_counter(), len(self._running)
            slept = await self._lease.renew_during(self._engine.sleep())
            self._metrics.device_seconds.labels(step="sleep").observe(time.perf_counter() - started)
            self._metrics.device_freed.set(slept.freed)
            if not slept.cache:
                self._metrics.recomputed.inc(running)
            logger.info("left the devices: %d bytes freed, %d running sequences wait", slept.freed, running)
            grant = await self._next_grant()
            started = time.perf_counter()
            await self._lease.renew_during(self._engine.wake())
            self._metrics.device_seconds.labels(step="wake").observe(time.perf_counter() - started)
        return slept, grant

    async def _next_grant(self) -> Grant:
        """Releases the devices and waits until they are granted again, also while Redis cannot be reached."""
        while True:
            try:
                await self._lease.give_up()
                return await self._lease.acquire()
            except StoreError as error:
                logger.warning("the devices could not be released or acquired, retrying: %s", error)
                await asyncio.sleep(self._retry_seconds)

    async def _wait_for_version(self, grant: Grant, holding: "asyncio.Future[None]") -> None:
        """Waits for the commit of the learner's newest version, until the devices are wanted or `PUSH_TIMEOUT` has passed."""
        if grant.version > (-1 if self._swapper.version is None else self._swapper.version):
            committed = asyncio.ensure_future(self._swapper.steady_version())
            await asyncio.wait((committed, holding), timeout=PUSH_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            committed.cancel()
