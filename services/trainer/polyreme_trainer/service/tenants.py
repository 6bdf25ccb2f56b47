"""What the service knows of a tenant's sessions, models and sampling sessions.

Invariant: what belongs to another tenant is unknown: the answer does not tell it from what does not exist.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from starlette.exceptions import HTTPException

from polyreme.experience.requests import RequestLog
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.wire import ENDED, UNLOADED

Record = Mapping[str, str]
OwnedKind = Literal["session", "model", "agent session"]
"""What a tenant has a bounded number of."""
_ENDS = {"session": "Finish", "model": "Unload", "agent session": "End"}


@dataclass(frozen=True)
class TenantModel:
    """A model that is trained. base_model: its name for clients, see `messages.name_of`. rank: of its adapters; 0: all
    parameters. used: its last request, seconds since the epoch. is_unloaded: its last request is the one that unloads it."""

    name: str
    base_model: str
    rank: int
    metadata: dict[str, object]
    used: float
    is_unloaded: bool


class Tenants:
    """Reads and writes the records in the log."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._adding = WeakValueDictionary[str, asyncio.Lock]()
        """By tenant: what is added at the same time is counted, too."""

    async def add_record(
        self, tenant: str, kind: OwnedKind, name: str, fields: Mapping[str, str], most: int, groups: Sequence[str] = ()
    ) -> None:
        """Adds a tenant's session or model, also to further `groups`; deletes old ended ones. Raises TenantError at `most`."""
        async with self._adding.setdefault(tenant, asyncio.Lock()):
            names = await self._log.names(kind, tenant)
            records = {each: await self._log.record(kind, each) for each in names} if len(names) >= most else {}
            ended = [each for each, record in records.items() if record is None or ENDED in record]
            if (count := len(records) - len(ended)) >= most:
                do = f"{_ENDS[kind]} one, or ask for a larger quota."
                raise TenantError(f"expected at most {most} {kind}s of a tenant; found {count}. {do}")
            for each in ended[self._log.limits.ended_records :]:
                await self._log.delete_record(kind, each, (tenant,))
            await self._log.set_record(kind, name, {"tenant": tenant, **fields}, (tenant, *groups))

    async def session(self, tenant: str, name: str) -> Record:
        """What is known of a session, with ENDED when its client has finished it. Raises HTTPException for an unknown one."""
        return await self._record(tenant, "session", name)

    async def open_session(self, tenant: str, name: str) -> None:
        """Raises HTTPException for an unknown session, and TenantError for a finished one."""
        if ENDED in await self.session(tenant, name):
            raise TenantError("expected a session that goes on; found one that its client has finished")

    async def finish_session(self, tenant: str, name: str, how: str) -> None:
        """The first end of a session stands. Raises HTTPException for an unknown session."""
        if ENDED not in await self.session(tenant, name):
            await self._log.set_record("session", name, {ENDED: how})

    async def add_model(
        self, tenant: str, session: str, number: int, base_model: str, lora: Mapping[str, Any] | None, metadata: Any, most: int
    ) -> str:
        """The new model's name. base_model, lora: see `TenantModel`, `LoraOptions`. Raises TenantError at `most` models."""
        name = f"{session}:train:{number}"
        if await self._log.record("model", name) is not None:  # the first request of a number stands
            return name
        fields = {"base_model": base_model, "rank": str(lora["rank"] if lora else 0), "metadata": json.dumps(metadata)}
        await self.add_record(tenant, "model", name, fields, most, (session,))
        return name

    async def model(self, tenant: str, name: str) -> TenantModel:
        """Raises HTTPException for an unknown model."""
        record, used = await self._used(tenant, "model", name)
        about = json.loads(record["metadata"]), used, record.get(ENDED) == UNLOADED
        return TenantModel(name, record["base_model"], int(record["rank"]), *about)

    async def add_sampling(self, tenant: str, session: str, number: int, path: str) -> str:
        """Returns the name of the new sampling session. path: of its checkpoint; empty: the base model."""
        name = f"{session}:sample:{number}"
        await self._log.set_record("sampling", name, {"tenant": tenant, "path": path}, (session,))
        return name

    async def sampling(self, tenant: str, name: str) -> str:
        """The checkpoint's path of a sampling session. Raises HTTPException for an unknown one."""
        return (await self._record(tenant, "sampling", name))["path"]

    async def agent_session(self, tenant: str, id: str) -> Record:
        """What an agent's session samples from, see `AgentPolicy`. Raises HTTPException for an unknown one."""
        return await self._record(tenant, "agent session", id)

    async def check_request(self, tenant: str, request: str) -> None:
        """Raises HTTPException for a request of a session that is unknown. A request without one has a random id."""
        if (found := re.match(r"([0-9a-f]{32}):", request)) is not None:
            await self._record(tenant, "session", found[1])

    async def _record(self, tenant: str, kind: str, name: str) -> Record:
        return (await self._used(tenant, kind, name))[0]

    async def _used(self, tenant: str, kind: str, name: str) -> tuple[Record, float]:
        """A record, and when it was used before."""
        if (found := await self._log.use_record(tenant, kind, name)) is None:
            what = kind.replace("sampling", "sampling session")
            raise HTTPException(404, f"expected a {what} of this service; found {name!r:.80}")
        return found
