"""A session of a running product, which is in the log between any two of its requests.

Invariant: a turn is in the log before its reply is sent, so a reply that was lost, even with its server, is repeated by any other one. Requests of a
session at one server are answered one after the other; the log refuses a turn of another server that came meanwhile.
"""

import asyncio
import json
import time
from typing import Any, Protocol

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1.experience_pb2 import ToolCall
from polyreme.experience.online import OnlineSession
from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import RefusedRequestError, TurnRequest
from polyreme_environment.agents.session import AgentSession, Asked, Read, agent_request
from polyreme_environment.contract import Reply


class TurnKeeper(Protocol):
    """What samples turns and keeps sessions. Its calls raise RefusedRequestError."""

    async def sample(self, request: pb.AgentRequest) -> pb.Answer: ...

    async def keep(self, id: str, number: int, exchange: pb.SessionExchange) -> None:
        """Stores a turn of a session."""


async def next_turn(session: AgentSession, kept: OnlineSession | None, policy: TurnKeeper, read: Read) -> AgentTurn:
    """The turn that answers a request.

    Args:
        session: a new one with the id of the product's.
        kept: the product's session; None: nothing of it is kept.

    Raises:
        RefusedRequestError: there is no turn.
    """
    exchanges = [pb.SessionExchange.FromString(turn) for turn in kept.turns] if kept else []
    for exchange in exchanges:
        told = json.loads(exchange.request_json)
        session.replay(_asked(told, exchange.answer.number), exchange.answer, told["created"])
    request = read(session.history)
    if (known := session.known(request)) is not None:
        return known
    if kept is not None and kept.state != "open":
        raise RefusedRequestError(400, f"expected an open session; found one that is {kept.state}", "episode_over")
    answered = asyncio.ensure_future(session.answer(request))
    try:
        if (asked := await _next(session, answered)) is not None:
            wanted = agent_request(asked)
            wanted.session = session.id.removeprefix("u")
            wanted.records.extend(exchange.answer.record for exchange in exchanges)
            answer, created = await policy.sample(wanted), int(time.time())
            if answer.refused:
                session.refused(asked.number, answer.refused, over=answer.over)
            else:
                if kept is not None:
                    calls = [ToolCall(name=n, arguments=a, result=r, seconds=s, error=e) for n, a, r, s, e in asked.calls]
                    exchange = pb.SessionExchange(
                        request_json=json.dumps(_told(asked, created)), answer=answer, after=asked.after, calls=calls
                    )
                    await policy.keep(session.id, len(exchanges), exchange)
                session.sampled(answer, created)
        return await answered
    finally:
        answered.cancel()


async def _next(session: AgentSession, answered: "asyncio.Future[AgentTurn]") -> Asked | None:
    """What the request asks for; None when it was refused, as `answered` says."""
    asking = asyncio.ensure_future(session.next())
    both: set[asyncio.Future[Any]] = {asking, answered}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        found = asking.result() if asking.done() else None
        return found if isinstance(found, Asked) else None
    finally:
        asking.cancel()


def _told(asked: Asked, created: int) -> dict[str, object]:
    """A request as it is kept, for `_asked`, with the Unix time of its answer."""
    request = asked.request
    names = ("tools", "calls", "prompt", "stop", "wants_tokens", "instructions")
    fields = {name: getattr(request, name) for name in names}
    return {"created": created, "digest": request.digest.hex(), "after": asked.after, "messages": asked.messages, **fields}


def _asked(told: Reply, number: int) -> Asked:
    fields = {name: told[name] for name in ("tools", "calls", "wants_tokens", "instructions")}
    prompt = tuple(told["prompt"]) if isinstance(told["prompt"], list) else told["prompt"]
    request = TurnRequest(bytes.fromhex(told["digest"]), prompt=prompt, stop=tuple(told["stop"]), **fields)
    return Asked(number, request, told["after"], told["messages"], None, [])
