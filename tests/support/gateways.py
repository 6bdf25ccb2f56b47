"""Replicas for a gateway, with the HTTP application of `polyreme rollout` and scripted or simulated answers.

A scripted replica has no engine: its /v1 is an ASGI application of the test. Leases are real and in the run's Redis.
"""

import asyncio
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from polyreme import API_VERSION
from polyreme.config.security import SecurityConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.gateway.limits import GatewayLimits
from polyreme.gateway.serve import serve_gateway
from polyreme.net.http_server import serve_http
from polyreme_rollout.http.http_app import make_app
from polyreme_rollout.metrics import ReplicaMetrics

Answer = Callable[[bytes, Send], Awaitable[None]]
"""Answers a request's body."""


@dataclass
class ScriptedReplica:
    """A replica with scripted answers. It reports its `version` and `load`; `bodies` has the bodies of its requests, in order.

    Attributes:
        asked: set when a request has arrived.
        lease: `await lease.aclose()` removes it; the server continues.
        left: set when a connection has ended before the answer.
    """

    id: str
    answer: Answer
    version: int | None = 0
    metrics: ReplicaMetrics = field(default_factory=ReplicaMetrics)
    bodies: list[bytes] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    lease: AsyncExitStack = field(default_factory=AsyncExitStack)
    headers: list[dict[str, bytes]] = field(default_factory=list)

    def report(self, version: int | None, load: int = 0) -> None:
        self.version = version
        self.metrics.version.set(-1 if version is None else version)
        self.metrics.ready.set(version is not None)
        self.metrics.active_sequences.set(load)

    async def v1(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.headers.append({name.decode(): value for name, value in scope["headers"]})
        self.asked.set()
        answering = asyncio.ensure_future(self.answer(body, send))
        leaving = asyncio.ensure_future(receive())  # a disconnection
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.left.set()
        answering.cancel()
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await answering


@asynccontextmanager
async def scripted_replica(
    run: Run,
    id: str,
    answer: Answer,
    version: int | None = 0,
    load: int = 0,
    security: SecurityConfig | None = None,
    max_model_len: int = 64,
) -> AsyncIterator[ScriptedReplica]:
    """Starts a scripted replica with a lease."""
    replica = ScriptedReplica(id, answer)
    replica.report(version, load)

    async def served() -> int | None:
        return replica.version

    async def openai() -> Any:
        return replica.v1

    app = make_app(lambda: True, lambda: replica.version is not None, served, replica.metrics, openai)
    async with serve_http("127.0.0.1", 0, app, security=security) as port:
        facts = {"max_model_len": max_model_len}
        lease = Lease("rollout", f"{id}-{uuid.uuid4().hex[:4]}", "127.0.0.1:1", f"127.0.0.1:{port}", API_VERSION, facts)
        replica.id = lease.id
        async with replica.lease:
            await replica.lease.enter_async_context(await Registry(run).register(lease))
            yield replica


@asynccontextmanager
async def gateway(
    run: Run,
    aliases: Sequence[str] = (),
    requests: int = 64,
    seconds: float = 300.0,
    url: str = "http",
    verify: ssl.SSLContext | bool = False,
    poll_interval: float = 0.02,
    **limits: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Starts a gateway of the run, which is patient with slow machines, and yields a client of it.

    Args:
        url: its scheme.
        verify: TLS of the client.
        limits: further ones of `GatewayLimits`.
    """
    bounds = GatewayLimits(requests, seconds, poll_interval=poll_interval, poll=300.0, **limits)
    async with (
        serve_gateway(run, "127.0.0.1", 0, aliases, bounds) as port,
        httpx.AsyncClient(base_url=f"{url}://127.0.0.1:{port}", trust_env=False, timeout=300, verify=verify) as http,
    ):
        yield http


async def shows(http: httpx.AsyncClient, *lines: str) -> bool:
    """Waits until a gateway's metrics have these lines, which may appear after the end of a reply."""
    return set(lines) <= set((await http.get("/metrics")).text.splitlines())


def reply_with(body: bytes, content: str = "application/json", status: int = 200) -> Answer:
    """Answers with one whole body."""

    async def answer(asked: bytes, send: Send) -> None:
        headers = [(b"content-type", content.encode()), (b"x-request-id", b"id-of-the-replica")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


def stream_of(*parts: bytes, breaks: bool = False, go_on: asyncio.Event | None = None) -> Answer:
    """Answers with a stream of events, in the given pieces.

    Args:
        breaks: whether the connection breaks after them.
        go_on: awaited after the first piece.
    """

    async def answer(asked: bytes, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if go_on and not place:
                await go_on.wait()
        if breaks:
            raise ConnectionAbortedError("the script ends the replica here")
        await send({"type": "http.response.body", "body": b""})

    return answer
