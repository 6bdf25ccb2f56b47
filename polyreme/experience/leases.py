"""Leases: the registrations of live servers.

Invariant: a lease exists while its owner renews it, so a dead server disappears after at most one ttl. Renewal and registration
are the same write, so a lease that expired during a pause of Redis or of its owner is restored by the next renewal.
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

logger = logging.getLogger(__name__)

Kind = Literal["rollout", "reward", "environment", "learner"]
_REMOVE_TIMEOUT = 2.0  # to remove the lease at exit; it expires anyway


@dataclass(frozen=True)
class Lease:
    """A server's registration.

    Attributes:
        kind: the service; learner: one machine of a learner on several.
        id: unique among all processes of the run, restarts included.
        address: host:port of its gRPC server; of a learner's machine: its ranks' rendezvous, or its host.
        http_address: host:port of its HTTP server; empty: none.
        api: API version of its protos.
        facts: further properties, as JSON.
    """

    kind: Kind
    id: str
    address: str
    http_address: str
    api: int
    facts: dict[str, Any] = field(default_factory=dict)


class Registry:
    """The leases of one run.

    Attributes:
        learner_term: the learner's term at the last renewal of a lease that was registered here; 0 before the first. A call of a
            lower term comes from a replaced learner.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.learner_term = 0

    async def register(self, lease: Lease, ttl: float = 10.0) -> "LeaseKeeper":
        """Registers a server for as long as the keeper's `async with` block lasts.

        Args:
            lease: the registration.
            ttl: seconds after its owner's death at which it expires.
        """
        keeper = LeaseKeeper(self, lease, ttl)
        await keeper.renew()
        return keeper

    async def now(self) -> float:
        """Unix time of Redis, in seconds: the one clock that all machines of a run share."""
        seconds, microseconds = await self.run.redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def leases(self, kind: Kind) -> list[Lease]:
        """The live leases of a kind, sorted by id."""
        ids = sorted(name.decode() for name in await self.run.redis.smembers(self.run.key(f"leases:{kind}")))
        texts = await self.run.redis.mget([self.run.key(f"lease:{kind}:{name}") for name in ids]) if ids else []
        for name in (name for name, text in zip(ids, texts, strict=True) if text is None):
            await _unlease(self.run, kind, name, even_if_alive=False)
        return [_read(text) for text in texts if text is not None]

    async def wait_for(
        self,
        kind: Kind,
        count: int,
        timeout: float,  # noqa: ASYNC109
        alive: Callable[[], object] | None = None,
    ) -> list[Lease]:
        """Waits for at least `count` leases of a kind.

        Args:
            kind, count: kind and number of the leases.
            timeout: seconds.
            alive: called at every check; it raises, or returns False, when waiting is pointless.

        Raises:
            UnavailableError: there are fewer; the message lists them.
            RunFailedError: the run has failed.
        """
        live: list[Lease] = []
        stopped = False

        async def enough() -> bool | None:
            nonlocal live, stopped
            await self.run.check()
            live = await self.leases(kind)
            stopped = alive is not None and alive() is False
            return True if stopped or len(live) >= count else None

        await self.run.until(enough, within=timeout)
        if len(live) < count:
            raise UnavailableError(
                f"{count} {kind} server{'s' if count > 1 else ''}" + ("" if stopped else f" within {timeout:g} s"),
                f"{len(live)} ({', '.join(f'{lease.id} at {lease.address}' for lease in live) or 'none'})"
                + (", and their source has ended" if stopped else ""),
                f"See the logs of the {kind} servers, or start one with `polyreme {kind} --redis URL`.",
            )
        return live


class LeaseKeeper:
    """Renews one lease: `async with await registry.register(lease) as keeper`. Removes it at the end of the block.

    Attributes:
        lease: as currently registered.
    """

    def __init__(self, registry: Registry, lease: Lease, ttl: float) -> None:
        self._registry, self._run, self._ttl, self.lease = registry, registry.run, ttl, lease
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Writes the lease for another ttl. Raises StoreError."""
        async with self._writing:  # a slow write must not replace newer facts
            lease = self.lease
            text = json.dumps(asdict(lease), sort_keys=True)
            keys = [self._run.key(f"lease:{lease.kind}:{lease.id}"), self._run.key(f"leases:{lease.kind}")]
            event = f"{lease.kind} {lease.id}"
            term = await self._run.scripts.call("lease", lease.id, text, int(self._ttl * 1000), event, keys=keys)
        self._registry.learner_term = max(self._registry.learner_term, int(term))

    async def update(self, facts: Mapping[str, object]) -> None:
        """Merges `facts` into the lease and writes it."""
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
            async with asyncio.timeout(_REMOVE_TIMEOUT):
                await _unlease(self._run, self.lease.kind, self.lease.id, even_if_alive=True)
        except (PolyremeError, TimeoutError) as error:
            logger.warning("lease %s was not removed and will expire: %s", self.lease.id, error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            try:
                await self.renew()
            except StoreError as error:
                logger.warning("lease %s could not be renewed: %s", self.lease.id, error)


def _read(text: bytes) -> Lease:
    """Decodes a lease, without the fields of other releases."""
    known = {field.name for field in fields(Lease)}
    return Lease(**{name: value for name, value in json.loads(text).items() if name in known})


async def _unlease(run: Run, kind: Kind, name: str, even_if_alive: bool) -> None:
    keys = [run.key(f"lease:{kind}:{name}"), run.key(f"leases:{kind}")]
    await run.scripts.call("unlease", name, f"{kind} {name}", int(even_if_alive), keys=keys)
