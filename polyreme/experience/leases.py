"""Which servers are there: a lease lives while its owner renews it, so a dead server is gone after at most one ttl.

Renewal and registration are the same write, so a lease that expired while Redis or its owner stood still comes back by itself.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from polyreme.errors import PolyremeError, StoreError, UnavailableError
from polyreme.experience.run import Run

log = logging.getLogger(__name__)

Kind = Literal["rollout", "reward", "learner"]
_LEAVE = 2.0  # seconds for taking the lease away at exit; it expires by itself anyhow


@dataclass(frozen=True)
class Lease:
    """A server's registration.

    Attributes:
        kind: what it serves; learner: a machine of a learner that is on several.
        id: unique among all processes of the run, also over restarts.
        address: host:port of its gRPC server; of a learner's machine: where its ranks meet, or its host alone.
        http_address: host:port of its HTTP server; empty: it has none.
        api: schema number of its protos.
        facts: whatever else others should know, as JSON.
    """

    kind: Kind
    id: str
    address: str
    http_address: str
    api: int
    facts: dict[str, Any] = field(default_factory=dict)


class Registry:
    """The leases of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    async def register(self, lease: Lease, ttl: float = 10.0) -> "LeaseKeeper":
        """Registers a server for as long as the keeper's `async with` block lasts.

        Args:
            lease: the registration.
            ttl: seconds after which it is gone when its owner has died.
        """
        keeper = LeaseKeeper(self.run, lease, ttl)
        await keeper.renew()
        return keeper

    async def leases(self, kind: Kind) -> list[Lease]:
        """The living leases of a kind, by id."""
        ids = sorted(name.decode() for name in await self.run.redis.smembers(self.run.key(f"leases:{kind}")))
        texts = await self.run.redis.mget([self.run.key(f"lease:{kind}:{name}") for name in ids]) if ids else []
        for name in (name for name, text in zip(ids, texts, strict=True) if text is None):
            await _unlease(self.run, kind, name, alive_too=False)
        return [_read(text) for text in texts if text is not None]

    async def wait_for(
        self,
        kind: Kind,
        count: int,
        timeout: float,  # noqa: ASYNC109
        alive: Callable[[], object] | None = None,
    ) -> list[Lease]:
        """Waits until at least `count` leases of a kind live.

        Args:
            kind, count: what to wait for.
            timeout: seconds.
            alive: asked at every look; it raises, or returns False, when waiting has become pointless.

        Raises:
            UnavailableError: not enough came; the message says which did.
            RunFailedError: the run failed meanwhile.
        """
        there: list[Lease] = []
        stopped = False

        async def look() -> bool | None:
            nonlocal there, stopped
            await self.run.check()
            there = await self.leases(kind)
            stopped = alive is not None and alive() is False
            return True if stopped or len(there) >= count else None

        await self.run.until(look, within=timeout)
        if len(there) < count:
            raise UnavailableError(
                f"{count} {kind} server{'s' if count > 1 else ''}" + ("" if stopped else f" within {timeout:g} s"),
                f"{len(there)} ({', '.join(f'{lease.id} at {lease.address}' for lease in there) or 'none'})"
                + (", and what was to bring more has ended" if stopped else ""),
                f"Look at the logs of the {kind} servers, or start one with `polyreme {kind} --redis URL`.",
            )
        return there


class LeaseKeeper:
    """Keeps one lease alive: `async with await registry.register(lease) as keeper`. It leaves at the block's end.

    Attributes:
        lease: as registered now.
        learner_term: the learner's term at the last renewal; 0 before the first. Calls of a lower one are a zombie's.
    """

    def __init__(self, run: Run, lease: Lease, ttl: float) -> None:
        self._run, self._ttl, self.lease = run, ttl, lease
        self.learner_term = 0
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Writes the lease now, for another ttl. Raises StoreError."""
        async with self._writing:  # a write that takes long must not put old facts in the place of new ones
            lease = self.lease
            text = json.dumps(asdict(lease), sort_keys=True)
            keys = [self._run.key(f"lease:{lease.kind}:{lease.id}"), self._run.key(f"leases:{lease.kind}")]
            event = f"{lease.kind} {lease.id}"
            term = await self._run.scripts.call("lease", lease.id, text, int(self._ttl * 1000), event, keys=keys)
        self.learner_term = max(self.learner_term, int(term))

    async def update(self, facts: Mapping[str, Any]) -> None:
        """Merges `facts` into the lease's, and writes it."""
        self.lease = replace(self.lease, facts={**self.lease.facts, **facts})
        await self.renew()

    async def __aenter__(self) -> "LeaseKeeper":
        self._task = asyncio.create_task(self._keep(), name=f"lease {self.lease.id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        try:
            async with asyncio.timeout(_LEAVE):
                await _unlease(self._run, self.lease.kind, self.lease.id, alive_too=True)
        except (PolyremeError, TimeoutError) as error:
            log.warning("lease %s is left to expire: %s", self.lease.id, error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            try:
                await self.renew()
            except StoreError as error:
                log.warning("lease %s could not be renewed: %s", self.lease.id, error)


def _read(text: bytes) -> Lease:
    """A lease as it was written, perhaps by another release: what that has beyond ours is left out."""
    known = {field.name for field in fields(Lease)}
    return Lease(**{name: value for name, value in json.loads(text).items() if name in known})


async def _unlease(run: Run, kind: Kind, name: str, alive_too: bool) -> None:
    keys = [run.key(f"lease:{kind}:{name}"), run.key(f"leases:{kind}")]
    await run.scripts.call("unlease", name, f"{kind} {name}", int(alive_too), keys=keys)
