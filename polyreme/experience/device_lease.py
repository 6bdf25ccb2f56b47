"""The device lease of a colocated run: its learner and replicas share devices, which are granted for `train` or for `generate`.

Invariant: a grant of `train` exists only while there is no other grant. A grant ends when its holder releases it, or when its
deadline has passed and another process needs the devices. The counter of an ended grant is refused forever. A holder stops using
the devices at its own deadline, which is never later than the one in Redis, unless a renewal has reached Redis since. The
learner, which cannot stop inside a step, checks its grant before it publishes a trained version.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from polyreme.errors import StoreError, UnavailableError
from polyreme.experience.run import Run
from polyreme.experience.scripts import StaleGrantError

Use = Literal["train", "generate"]
T = TypeVar("T")

TTL = 10.0
"""Seconds after which the grant of a dead holder ends."""


@dataclass(frozen=True)
class Grant:
    """A grant of the devices.

    Attributes:
        counter: counter of this grant, higher than that of every earlier one.
        wanted: whether a claim of `train` waits until this holder releases the devices.
        version: the learner's newest version; -1 before the first.
    """

    counter: int
    wanted: bool
    version: int


class DeviceLease:
    """One holder's side of the lease.

    Args:
        run: the run, whose devices are all granted together.
        use: the holder's use of the devices.
        holder: unique id among all processes of the run, including restarts.
        ttl: see `TTL`.
        counter: counter of a grant that the holder already has, whose deadline it reads at its first renewal; 0: none.

    Attributes:
        grant: the current one, None without one.
    """

    def __init__(self, run: Run, use: Use, holder: str, ttl: float = TTL, counter: int = 0) -> None:
        self._run, self._use, self._holder, self._ttl = run, use, holder, ttl
        self._deadline = 0.0
        self._others: list[str] = []
        self._calling = asyncio.Lock()
        self.grant: Grant | None = Grant(counter, False, -1) if counter else None

    @property
    def usable(self) -> bool:
        """Whether the devices may be used now: there is a grant whose deadline has not passed."""
        return self.grant is not None and time.monotonic() < self._deadline

    async def ask(self) -> Grant | None:
        """Claims the devices, or renews the grant. None: they are in use; a claim of `train` now waits for them.

        Raises:
            StaleGrantError: the grant has ended. The devices must not be used; the next call makes a new claim.
        """
        async with self._calling:
            return await self._ask()

    async def renew(self) -> Grant | None:
        """Renews the grant, as `ask` does. Without a grant it does nothing."""
        async with self._calling:
            return await self._ask() if self.grant else None

    async def _ask(self) -> Grant | None:
        asked = time.monotonic()
        try:
            answer = await self._call("ask")
        except StaleGrantError:
            self.grant = None
            raise
        counter, wanted, version, *others = answer
        self._others = [other.decode() for other in others]
        self._deadline = asked + self._ttl
        self.grant = Grant(counter, bool(wanted), version) if counter else None
        return self.grant

    async def acquire(self, within: float = math.inf, alive: Callable[[], Awaitable[object]] | None = None) -> Grant:
        """Waits for the devices.

        Args:
            within: timeout in seconds.
            alive: awaited at every check; it raises when waiting is pointless.

        Raises:
            UnavailableError: they were in use for `within` seconds; the message names the holders.
        """

        async def granted() -> Grant | None:
            if alive is not None:
                await alive()
            return await self.ask()

        grant = await self._run.until(granted, within)
        if grant is None:
            await self.give_up()
            raise UnavailableError(
                f"the devices for `{self._use}` within {within:g} s",
                f"they are in use by {', '.join(self._others) or 'nobody'}",
                "See the logs of the processes that hold them.",
            )
        return grant

    async def hold(self) -> None:
        """Renews the grant until a claim of `train` waits, or until the devices may no longer be used.

        If Redis is lost, it returns when the grant's deadline passes.
        """
        last = "$"
        while self.usable:
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    last = await self._run.last_event() if last == "$" else last
                    grant = await self.renew()
                    if grant is None or grant.wanted:
                        return
                    last = await self._event(last, time.monotonic() + self._ttl / 3)
            except (StaleGrantError, TimeoutError):
                return
            except StoreError:
                await asyncio.sleep(self._ttl / 20)

    async def renew_during(self, work: Awaitable[T]) -> T:
        """Awaits `work`, which prepares the devices for this holder or for the next one, while it renews the grant."""
        task = asyncio.ensure_future(work)
        renewing = asyncio.create_task(self._renew_until(task))  # may wait for Redis longer than the work takes
        try:
            await asyncio.wait({task, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if renewing.done():
                renewing.result()  # raises its error
            return await task
        finally:
            renewing.cancel()
            task.cancel()

    async def _renew_until(self, task: "asyncio.Future[T]") -> None:
        while not (await asyncio.wait({task}, timeout=self._ttl / 3))[0]:
            with suppress(StaleGrantError, StoreError):
                await self.renew()

    async def give_up(self) -> None:
        """Ends the grant or the claim. Does nothing when it has already ended. Raises StoreError."""
        async with self._calling:
            try:
                with suppress(StaleGrantError):
                    await self._call("give")
            finally:
                self.grant, self._deadline = None, 0.0

    async def _event(self, last: str, until: float) -> str:
        """Waits for an event of the lease. Returns the id of the newest event."""
        while (left := until - time.monotonic()) > 0:
            last, signals = await self._run.watch(last, max(1, int(min(left, 1.0) * 1000)))
            if any(kind == "device" for kind, _ in signals):
                break
        return last

    async def _call(self, verb: str) -> Any:
        counter, keys = self.grant.counter if self.grant else 0, [self._run.key("device")]
        return await self._run.scripts.call("device", verb, self._use, self._holder, counter, int(self._ttl * 1000), keys=keys)


async def trains(run: Run) -> bool:
    """Whether the devices are granted or claimed for `train`."""
    return any(name.startswith(b"train:") for name in await run.redis.hkeys(run.key("device")))
