"""Live servers of one kind that speak our protocol.

Invariant: a server of another API number is never used, and that is said once.
"""

import logging

from polyreme import API_VERSION
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Kind, Lease, Registry
from polyreme.experience.run import Run, RunState

_log = logging.getLogger(__name__)

_SAME_VERSION = "Install the same Polyreme version everywhere."


class Servers:
    """The leases of a kind, as a client sees them."""

    def __init__(self, run: Run, kind: Kind) -> None:
        self._run, self._kind = run, kind
        self._registry = Registry(run)
        self._refused: dict[str, int] = {}

    async def live(self) -> dict[str, Lease]:
        """Usable leases by id."""
        usable = {}
        for lease in await self._registry.leases(self._kind):
            if lease.api == API_VERSION:
                usable[lease.id] = lease
            elif lease.id not in self._refused:
                self._refused[lease.id] = lease.api
                await self._refuse(lease)
        return usable

    @property
    def refused(self) -> str:
        """Servers that are not used, for messages; may be empty."""
        return ", ".join(f"{name} (API {api}, ours is {API_VERSION})" for name, api in sorted(self._refused.items()))

    async def wait_for(self, count: int, within: float, setting: str) -> None:
        """Waits for `count` usable servers, or until the run is neither starting nor running.

        Args:
            setting: the configuration key of `within`, for the message.

        Raises:
            UnavailableError: there are fewer after `within` seconds; says which there are.
            RunFailedError: the run failed meanwhile.
        """
        there: dict[str, Lease] = {}

        async def look() -> bool | None:
            nonlocal there
            there = await self.live()
            goes_on = await self._run.check() in (RunState.STARTING, RunState.RUNNING)
            return True if len(there) >= count or not goes_on else None

        if not await self._run.until(look, within=within):
            names = ", ".join(filter(None, [*(f"{lease.id} at {lease.address}" for lease in there.values()), self.refused]))
            raise UnavailableError(
                f"{count} {self._kind} server{'s' if count > 1 else ''} within {setting} = {within:g} s",
                f"{len(there)}" + (f": {names}" if names else ""),
                _SAME_VERSION
                if self._refused
                else f"See the {self._kind} servers' logs, start one with `polyreme {self._kind}`, or raise {setting}.",
            )

    async def _refuse(self, lease: Lease) -> None:
        text = (
            f"{lease.kind} server {lease.id} at {lease.address} is not used: expected API {API_VERSION}, found {lease.api}. "
            + _SAME_VERSION
        )
        _log.error("%s", text)
        await self._run.emit({"kind": "notice", "service": "orchestrator", "text": text})
