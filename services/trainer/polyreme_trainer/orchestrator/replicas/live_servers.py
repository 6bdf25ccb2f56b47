"""Live servers of one kind with our API version.

Invariant: servers with another API version are ignored; one notice each.
"""

import logging

from polyreme import API_VERSION
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Kind, Lease, Registry
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.run import Run, RunState

logger = logging.getLogger(__name__)

_SAME_VERSION = "Install the same Polyreme version everywhere."


class LiveServers:
    """The leases of one kind, for a client."""

    def __init__(self, run: Run, kind: Kind) -> None:
        self._run, self._kind = run, kind
        self._registry = Registry(run)
        self._refused: dict[str, int] = {}

    async def live(self) -> dict[str, Lease]:
        """Usable leases by id."""
        found = {}
        for lease in await self._registry.leases(self._kind):
            if lease.api == API_VERSION:
                found[lease.id] = lease
            elif lease.id not in self._refused:
                self._refused[lease.id] = lease.api
                await self._refuse(lease)
        return found

    @property
    def refused(self) -> str:
        """The ignored servers, for messages; may be empty."""
        return ", ".join(f"{name} (API {api}, ours is {API_VERSION})" for name, api in sorted(self._refused.items()))

    async def wait_for(self, count: int, seconds: float, setting: str) -> None:
        """Waits for `count` usable servers, or until the run is neither starting nor running.

        Args:
            setting: the configuration key of `seconds`, for the message.

        Raises:
            UnavailableError: there are fewer after `seconds`; the message lists them.
            RunFailedError: the run has failed.
        """
        usable: dict[str, Lease] = {}

        async def enough() -> bool | None:
            nonlocal usable
            usable = await self.live()
            continues = await self._run.check() in (RunState.STARTING, RunState.RUNNING)
            return True if len(usable) >= count or not continues else None

        if not await self._run.until(enough, within=seconds):
            names = ", ".join(filter(None, [*(f"{lease.id} at {lease.address}" for lease in usable.values()), self.refused]))
            raise UnavailableError(
                f"{count} {self._kind} server{'s' if count > 1 else ''} within {setting} = {seconds:g} s",
                f"{len(usable)}" + (f": {names}" if names else ""),
                _SAME_VERSION
                if self._refused
                else f"See the {self._kind} servers' logs, start one with `polyreme {self._kind}`, or raise {setting}.",
            )

    async def _refuse(self, lease: Lease) -> None:
        text = (
            f"{lease.kind} server {lease.id} at {lease.address} is ignored: expected API {API_VERSION}, found {lease.api}. "
            + _SAME_VERSION
        )
        logger.error("%s", text)
        await self._run.emit(ServiceNotice(service="orchestrator", text=text))
