"""Forwards one request to a replica, and to another one when the first fails before anything was sent.

Invariant: a client gets the reply of one replica, unchanged, or one error. A request with a version is answered only by that
version. Every request, including its body, ends at its deadline and when its client disconnects, also at the replica.
"""

import asyncio
import time
from contextlib import suppress
from typing import Literal

import httpx
from starlette.types import Receive, Scope, Send

from polyreme.gateway.client import ReplicaHttp
from polyreme.gateway.limits import GatewayLimits
from polyreme.gateway.metrics import GatewayMetrics
from polyreme.gateway.names import ModelNames
from polyreme.gateway.replicas import ReplicaTable, ServedReplica
from polyreme.gateway.reply import EventSplitter, Reply, error_code, is_done
from polyreme.gateway.request import ForwardedRequest, RawHeaders, RefusedRequest, parse
from polyreme.net.http_server import left, read_body
from polyreme.process.tasks import unless

ATTEMPTS = 3
"""Maximum number of failed replicas per request."""
_Outcome = Literal["answered", "failed", "refused"]
"""The result of a replica: the client has a reply or part of one; the client has nothing; the replica serves another version."""
REPLICA_HEADER = "polyreme-replica"
_REFUSAL = "policy_version"
"""Code of a replica's error: it serves another version, or has swapped to another one before the answer was complete."""
_TO_CLIENT = (b"content-type", b"polyreme-policy-version", b"x-request-id")


class Forwarder:
    """The ASGI application of the forwarded paths.

    Args:
        names, table: model names and replicas of the run.
        http: client of the replicas.
    """

    def __init__(
        self, names: ModelNames, table: ReplicaTable, http: ReplicaHttp, metrics: GatewayMetrics, limits: GatewayLimits
    ) -> None:
        self._names, self._table, self._http, self._metrics, self._limits = names, table, http, metrics, limits
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, reply = time.monotonic(), Reply(send)
        try:
            await self._admit(scope, receive, reply)
        finally:
            self._metrics.requests.labels(status=str(reply.status or "none")).inc()
            self._metrics.seconds.observe(time.monotonic() - began)
            self._metrics.broken.inc(int(reply.failed))

    async def _admit(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        if self._active >= self._limits.requests:
            found = f"expected at most {self._limits.requests} requests at once. Ask again after a while."
            return await reply.fail(429, found, "rate_limit_exceeded")
        self._active += 1
        self._metrics.active.set(self._active)
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await read_body(receive)
                if body is not None:
                    await unless(left(receive), self._answer(scope["path"], scope["headers"], body, reply))
        except TimeoutError:
            found = f"expected a request and its whole answer within {self._limits.seconds:g} s. Ask for less."
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.last_word):
                    await reply.fail(504, found, "timeout")
        finally:
            self._active -= 1
            self._metrics.active.set(self._active)

    async def _answer(self, path: str, headers: RawHeaders, body: bytes, reply: Reply) -> None:
        try:
            request = parse(path, headers, body, self._names, self._table.versions)
        except RefusedRequest as refused:
            return await reply.fail(refused.status, refused.message, refused.code)
        await self._try_replicas(request, reply)

    async def _try_replicas(self, request: ForwardedRequest, reply: Reply) -> None:
        tried: set[str] = set()
        attempts = 0
        while attempts < ATTEMPTS:
            with self._table.chosen(request.wanted, tried, request.bounds) as replica:
                if replica is None:
                    break
                self._metrics.retries.inc(int(bool(tried)))
                tried.add(replica.id)
                outcome = await self._forward(request, replica, reply)
            if outcome == "answered":
                return
            attempts += int(outcome == "failed")
        names, versions = self._names.described(self._table.versions), self._table.versions
        if not versions:
            await reply.fail(503, "expected a replica that serves a version; found none. Ask again after a while.", "no_replica")
        elif not tried and isinstance(request.wanted, int) and request.wanted not in versions:
            found = f"expected {names}; found version {request.wanted}, which no replica serves. Fix `model`."
            await reply.fail(404, found, "model_not_found")
        elif not tried:
            found = f"expected a version that the headers allow; found {', '.join(map(str, versions))}. Ask again after a while."
            await reply.fail(503, found, "no_answer")
        else:
            found = f"no answer of {len(tried)} replicas that satisfies the version headers"
            await reply.fail(503, f"expected {names}; found {found}. Ask again.", "no_answer")

    async def _forward(self, request: ForwardedRequest, replica: ServedReplica, reply: Reply) -> _Outcome:
        outcome = await unless(replica.gone.wait(), self._exchange(request, replica, reply))
        if outcome is None and reply.status:
            await self._lose(reply, f"replica {replica.id} has gone")
            return "answered"
        return outcome or "failed"

    async def _exchange(self, request: ForwardedRequest, replica: ServedReplica, reply: Reply) -> _Outcome:
        try:
            answer = await self._http.send("POST", replica.address, request.path, content=request.body, headers=request.headers)
        except httpx.TransportError:
            replica.version = None  # not chosen until it answers again
            return "failed"
        try:
            if answer.status_code == 503:
                replica.version = None
                return "failed"
            if answer.status_code == 412:
                return "refused"
            headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() in _TO_CLIENT]
            headers.append((REPLICA_HEADER.encode(), replica.id.encode()))
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return await self._stream(answer, headers, replica, reply)
            await reply.whole(answer.status_code, headers, await answer.aread())
            return "answered"
        except httpx.TransportError:
            replica.version = None
            return "failed"
        finally:
            await answer.aclose()

    async def _stream(
        self, answer: httpx.Response, headers: list[tuple[bytes, bytes]], replica: ServedReplica, reply: Reply
    ) -> _Outcome:
        splitter, last = EventSplitter(), b""
        try:
            async for data in answer.aiter_raw():
                if not (events := splitter.feed(data)):
                    continue
                if not reply.status and error_code(events) == _REFUSAL:
                    return "refused"
                await reply.events(headers, events)
                last = events
        except httpx.TransportError:
            replica.version = None
        if is_done(last):
            await reply.end()
        elif error_code(last) is not None:  # the replica's error; the stream may lack its end
            await reply.end_failed()
        elif reply.status:
            await self._lose(reply, f"replica {replica.id} ended within its answer")
        return "answered" if reply.status else "failed"

    async def _lose(self, reply: Reply, problem: str) -> None:
        await reply.fail(502, f"expected the rest of the answer; found that {problem}. Ask again.", "answer_lost")
