"""EnvironmentService over gRPC.

Invariant: this module only translates; a pool plays. An episode ends with its call, for whatever reason.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace

import grpc

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.api.v1.experience_pb2 import ToolCall
from polyreme.net.call_stream import CallError, CallStream
from polyreme.net.rpc import PENDING_CALLS
from polyreme_environment.contract import Moved, valid_text
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import (
    AgentMoved,
    EpisodeLostError,
    FullError,
    HostedEpisode,
    PlayError,
    Pool,
    StreamedEpisode,
    ToolLostError,
    WorkerLostError,
)

NAME: str = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
_CLOSE_SECONDS = 2.0
"""Seconds in which a caller may end its call after the last message. A caller whose write fails since the call has ended sees
gRPC's INTERNAL in place of the status, and no message that it has not read; so a call that is refused has sent its start."""


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Serves Run and RunMany for pools, by the names of their environments. `episodes`: that they play at the same time."""

    def __init__(self, pools: Mapping[str, Pool], metrics: EnvironmentMetrics, episodes: int) -> None:
        self._pools, self._metrics, self._episodes = pools, metrics, episodes
        self._streams: set[CallStream[pb.RunRequest, pb.RunResponse]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers this servicer with a server."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    def drain(self) -> None:
        """Ends the streams of many calls, once their last calls have ended."""
        for stream in self._streams:
            stream.end()

    async def Run(
        self, requests: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        goes_on = False
        try:
            async with aclosing(self.responses(requests)) as responses:
                async for response, is_last in responses:
                    yield response
                    goes_on = not is_last and response.HasField("ending")
            if goes_on:
                await _left(context)
        except CallError as error:
            await context.abort(error.code, valid_text(str(error)))

    async def RunMany(
        self, requests: AsyncIterator[pb.RunManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunManyResponse]:
        stream = CallStream(self.responses, pb.RunManyResponse, self._episodes + PENDING_CALLS)
        self._streams.add(stream)
        try:
            if all(pool.draining for pool in self._pools.values()):
                stream.end()
            async with aclosing(stream.run(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.discard(stream)

    async def responses(self, requests: AsyncIterator[pb.RunRequest]) -> AsyncGenerator[tuple[pb.RunResponse, bool], None]:
        """Plays an episode. Yields its messages, each with whether the call is over then: that of an agent, of whose turns the
        caller still tells, is not. Raises CallError."""
        if (first := await anext(requests, None)) is None:
            return
        if (pool := self._pools.get(first.start.environment)) is None:
            found = f"expected one of the environments {sorted(self._pools)}; found {first.start.environment!r:.100}"
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, found)
        if pool.draining:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        how = "left"
        try:
            async with pool.episode() as episode, aclosing(_play(episode, first, requests)) as responses:
                async for response in responses:
                    if response.HasField("ending"):
                        how = "failed" if response.ending.error else "done"
                    yield response, how != "left" and not isinstance(episode, StreamedEpisode)
        except FullError as error:
            how = ""
            self._metrics.refused.inc()
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        except EpisodeLostError as error:
            how = "lost"
            plays_on = isinstance(error, (WorkerLostError, ToolLostError))
            raise CallError(grpc.StatusCode.ABORTED if plays_on else grpc.StatusCode.UNAVAILABLE, str(error)) from error
        finally:
            if how:
                self._metrics.ended.labels(how).inc()


async def _play(
    episode: HostedEpisode | StreamedEpisode, first: pb.RunRequest, requests: AsyncIterator[pb.RunRequest]
) -> AsyncGenerator[pb.RunResponse, None]:
    began = time.monotonic()
    try:
        if isinstance(episode, StreamedEpisode):
            async with aclosing(_play_agent(episode, first, requests)) as responses:
                async for response in responses:
                    yield response
            return
        parts: dict[str, float] = {}
        request: pb.RunRequest | None = first
        while request is not None:
            began = time.monotonic()
            moved = await _reply(episode, request)
            parts |= moved.parts
            yield _response(replace(moved, parts=parts), time.monotonic() - began)
            request = None if moved.done else await anext(requests, None)
    except PlayError as error:
        yield pb.RunResponse(ending=pb.Ending(error=valid_text(str(error)), seconds=time.monotonic() - began))


async def _play_agent(
    episode: StreamedEpisode, first: pb.RunRequest, requests: AsyncIterator[pb.RunRequest]
) -> AsyncGenerator[pb.RunResponse, None]:
    async with aclosing(episode.play(_row(first), requests)) as moves:
        async for moved in moves:
            if moved.withdrawn:
                yield pb.RunResponse(withdrawal=pb.Withdrawal(number=moved.withdrawn))
                continue
            response = _response(moved, moved.seconds)
            told = response.ending if moved.done else response.ask
            told.rewards.update(moved.rewards)
            yield response


def _response(moved: Moved, seconds: float) -> pb.RunResponse:
    calls = [ToolCall(name=n, arguments=a, result=r, seconds=s, error=e) for n, a, r, s, e in moved.calls]
    if moved.done:
        return pb.RunResponse(ending=pb.Ending(reward=moved.reward, parts=moved.parts, seconds=seconds, calls=calls))
    messages = [pb.ChatMessage(role=role, content=content) for role, content in moved.messages]
    tools = json.dumps(moved.tools) if moved.tools else ""
    agent = moved.agent if isinstance(moved, AgentMoved) else None
    ask = pb.Ask(messages=messages, reward=moved.reward, seconds=seconds, tools_json=tools, calls=calls, agent=agent)
    return pb.RunResponse(ask=ask)


async def _left(context: grpc.aio.ServicerContext) -> None:
    """Waits for the caller to end its call."""
    left = asyncio.Event()
    context.add_done_callback(lambda _: left.set())
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await left.wait()


async def _reply(episode: HostedEpisode, request: pb.RunRequest) -> Moved:
    if request.HasField("answer"):
        return await episode.step(request.answer)
    return await episode.reset(_row(request), request.start.seed)


def _row(request: pb.RunRequest) -> dict[str, object]:
    """Raises CallError."""
    try:
        row = json.loads(request.start.row_json or "{}")
        found = f"a {type(row).__name__}"
    except (ValueError, RecursionError) as error:
        row, found = None, str(error)
    if not isinstance(row, dict):
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"expected start.row_json to be a JSON object; found {found}")
    return row
