"""A session of a running product, which is in the log between any two of its requests.

Invariant: a turn is in the log before its reply, or the end of its stream, is sent, so a reply that was lost, even with its
server, is repeated by any other one. A stream that is closed before leaves no turn. Requests of a session at one server are
answered one after the other; the log refuses a turn of another server that came meanwhile.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1.experience_pb2 import ToolCall
from polyreme.experience.online import OnlineSession
from polyreme_environment.agents.reply import AgentTurn, PartialTurn
from polyreme_environment.agents.request import RefusedRequestError, TurnRequest
from polyreme_environment.agents.session import AgentSession, Asked, Read, agent_request
from polyreme_environment.contract import Reply


class TurnKeeper(Protocol):
    """What samples turns and keeps sessions. Its calls raise RefusedRequestError."""

    def sample(self, request: pb.AgentRequest) -> AsyncGenerator[pb.Delta | pb.Answer, None]:
        """What is sampled of the turn, if the request is streamed, and at last the answer."""

    async def keep(self, id: str, number: int, exchange: pb.SessionExchange) -> None:
        """Stores a turn of a session."""


async def turn_parts(
    session: AgentSession, kept: OnlineSession | None, policy: TurnKeeper, read: Read, *, streams: bool
) -> AsyncGenerator[PartialTurn | AgentTurn, None]:
    """What is certain of the turn that answers a request, as it is sampled if `streams`, and at last the turn.

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
    request = replace(read(session.history), streams=streams)
    if (known := session.known(request)) is not None:
        yield known
        return
    if kept is not None and kept.state != "open":
        raise RefusedRequestError(400, f"expected an open session; found one that is {kept.state}", "episode_over")
    answered = asyncio.ensure_future(session.answer(request))
    try:
        await asyncio.sleep(0)  # the request waits now, unless it was refused, as `answered` says
        if isinstance(asked := session.take(), Asked):
            wanted = agent_request(asked)
            wanted.session = session.id.removeprefix("u")
            wanted.records.extend(exchange.answer.record for exchange in exchanges)
            part: PartialTurn | None = None
            async with aclosing(policy.sample(wanted)) as sampled:
                async for said in sampled:
                    if isinstance(said, pb.Delta):
                        if (part := session.told(said)) is not None:
                            yield part
                    elif said.refused:
                        session.refused(asked.number, said.refused, over=said.over)
                    else:
                        created = int(time.time()) if part is None else part.created
                        if kept is not None:
                            await policy.keep(session.id, len(exchanges), _exchange(asked, said, created))
                        session.sampled(said, created)
        yield await answered
    finally:
        answered.cancel()


def _exchange(asked: Asked, answer: pb.Answer, created: int) -> pb.SessionExchange:
    """A turn as it is kept, with the Unix time of its answer."""
    calls = [ToolCall(name=n, arguments=a, result=r, seconds=s, error=e) for n, a, r, s, e in asked.calls]
    return pb.SessionExchange(request_json=json.dumps(_told(asked, created)), answer=answer, after=asked.after, calls=calls)


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
