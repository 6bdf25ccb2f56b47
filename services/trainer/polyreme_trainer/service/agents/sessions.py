"""The sessions of agents as a tenant's client has them: it opens one, gives its address to an agent, and reads what was sampled.

    POST   /api/v1/agent_sessions       {"sampling_session_id": ...}, or a model: the address and its key
    GET    /api/v1/agent_sessions/ID    the exact tokens of its turns, its messages, its reward
    DELETE /api/v1/agent_sessions/ID    ends it

Invariant: a session that nobody ends is dropped `agents.max_age` after its last turn.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypedDict

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.api.v1.environment_pb2 import SessionExchange, SessionTurn
from polyreme.config.serve import ServeAgents
from polyreme.errors import StoreError
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.online import OnlineSessions, session_key, session_url
from polyreme.experience.requests import RequestLog
from polyreme.experience.run import Run
from polyreme.net.ports import join, loopback
from polyreme.process.tasks import running
from polyreme_trainer.service import messages as m
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.agents.run import KIND, AgentPolicy
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.http_answers import tenant_of
from polyreme_trainer.service.tenants import Tenants

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0


class SampledTokens(TypedDict):
    """A trajectory's tokens, with log-probabilities in nats (0 where none was sampled) and 1 where the policy sampled, else 0."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[int]


class AgentSessions:
    """The sessions of one service. `open` makes it.

    Args:
        experience: has the term of the run's writer, so that this process alone ends sessions.
        key: those of sessions are derived from it.
        https: whether the address has TLS.
    """

    def __init__(
        self,
        log: RequestLog,
        run: Run,
        experience: ExperienceLog,
        settings: ServeAgents,
        accounts: Accounts,
        key: str,
        https: bool,
    ) -> None:
        self._log, self._experience, self._settings, self._accounts = log, experience, settings, accounts
        self._kept, self._tenants = OnlineSessions(run, max_age=0), Tenants(log)
        self._key, self._scheme = key, "https" if https else "http"

    @classmethod
    async def open(
        cls, log: RequestLog, run: Run, settings: ServeAgents, accounts: Accounts, key: str, *, https: bool
    ) -> "AgentSessions":
        """Takes over from an earlier process."""
        experience = ExperienceLog(run)
        await experience.take(Writer.ORCHESTRATOR)
        return cls(log, run, experience, settings, accounts, key, https)

    def routes(self, prefix: str, weights_of: Callable[[str, m.OpenAgentSession], Awaitable[str]]) -> list[Route]:
        """The routes below `prefix`. `weights_of`: the directory that a request of a tenant samples from; "": the base model."""

        async def opened(request: HttpRequest) -> Response:
            tenant, given = tenant_of(request), m.read(m.OpenAgentSession, await request.body())
            policy = AgentPolicy(
                tenant, await weights_of(tenant, given), given.temperature, given.max_tokens or 0, given.seed or 0
            )
            id = await self._open(policy)
            server = self._settings.url or f"{self._scheme}://{join(request.url.hostname or loopback(), self._settings.port)}"
            address = {"base_url": session_url(server, id), "api_key": session_key(self._key, id)}
            return JSONResponse({"agent_session_id": id, **address})

        async def told(request: HttpRequest) -> Response:
            return JSONResponse(await self._told(tenant_of(request), request.path_params["id"]))

        async def ended(request: HttpRequest) -> Response:
            id = request.path_params["id"]
            await self._tenants.agent_session(tenant_of(request), id)
            await self._end(id, "closed")
            return Response(status_code=204)

        path = f"{prefix}/agent_sessions"
        one = f"{path}/{{id}}"
        return [Route(path, opened, methods=["POST"]), Route(one, told, methods=["GET"]), Route(one, ended, methods=["DELETE"])]

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[None]:
        """Within the block, drops what is too old."""
        async with running(self._sweep()):
            yield

    async def _sweep(self) -> None:
        while True:
            try:
                for id, reason in await self._kept.too_old(0, self._settings.max_age):
                    await self._end(id, reason)
            except StoreError as error:
                logger.warning("old sessions are dropped later: %s", error)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _open(self, policy: AgentPolicy) -> str:
        """The id of a new session. Raises TenantError when there is no room."""
        id, most = secrets.token_hex(8), self._accounts.quota_of(policy.tenant).sessions
        await self._tenants.add_record(policy.tenant, KIND, id, policy.record(), most)
        if not await self._kept.open(id, id, most := self._settings.max_sessions):
            await self._log.delete_record(KIND, id, (policy.tenant,))
            raise TenantError(f"expected at most agents.max_sessions = {most} sessions of agents; found as many. End some.")
        return id

    async def _told(self, tenant: str, id: str) -> dict[str, object]:
        await self._tenants.agent_session(tenant, id)
        kept = await self._kept.read(id)
        if kept.state not in ("open", "rewarded"):
            raise HTTPException(410, f"expected a session that is kept; found {id}, which has ended")
        turns = [SessionTurn.FromString(SessionExchange.FromString(each).answer.record) for each in kept.turns]
        messages = [message for turn in turns for message in json.loads(turn.messages_json)]
        state = {"agent_session_id": id, "is_rewarded": kept.state == "rewarded", "reward": kept.reward}
        return {**state, "turns": len(turns), "trajectories": trajectories(turns), "messages": messages}

    async def _end(self, id: str, reason: str) -> None:
        record = await self._log.record(KIND, id)
        await self._kept.drop(self._experience, id, reason)
        if record is not None:
            await self._log.delete_record(KIND, id, (record["tenant"],))


def trajectories(turns: Sequence[SessionTurn]) -> list[SampledTokens]:
    """The exact tokens of a session. A conversation that was rewritten has several trajectories. Pure."""
    found: list[SampledTokens] = []
    for turn in turns:
        if turn.trajectory == len(found):
            found.append({"tokens": [], "logprobs": [], "mask": []})
        each = found[turn.trajectory]
        context, ids = np.frombuffer(turn.context, "<i4").tolist(), np.frombuffer(turn.ids, "<i4").tolist()
        each["tokens"] += context + ids
        each["logprobs"] += [0.0] * len(context) + np.frombuffer(turn.logprobs, "<f4").tolist()
        each["mask"] += [0] * len(context) + [1] * len(ids)
    return found
