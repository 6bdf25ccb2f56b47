"""EnvironmentService over gRPC.

Invariant: this module only translates; a pool plays. An episode ends with its stream, for whatever reason.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace

import grpc

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.api.v1.experience_pb2 import ToolCall
from polyreme_environment.contract import Moved
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import (
    AgentMoved,
    EpisodeLostError,
    FullError,
    HostedEpisode,
    PlayError,
    Pool,
    StreamedEpisode,
    WorkerLostError,
)

NAME: str = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
_CLOSE_SECONDS = 2.0
"""Seconds in which a caller may end its call after the last message. A caller whose write fails since the call has ended sees gRPC's INTERNAL in
place of the status, and no message that it has not read; so a call that is refused has sent its start."""


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Serves Run for pools, by the names of their environments."""

    def __init__(self, pools: Mapping[str, Pool], metrics: EnvironmentMetrics) -> None:
        self._pools, self._metrics = pools, metrics

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers this servicer with a server."""
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def Run(
        self, requests: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        if (first := await anext(requests, None)) is None:
            return
        if (pool := self._pools.get(first.start.environment)) is None:
            found = f"expected one of the environments {sorted(self._pools)}; found {first.start.environment!r:.100}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, found)
            return  # for the type checker: abort raises
        if pool.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        how = "left"
        try:
            async with pool.episode() as episode:
                async for response in self._play(episode, first, requests, context):
                    if response.HasField("ending"):
                        how = "failed" if response.ending.error else "done"
                    yield response
            if isinstance(episode, StreamedEpisode):
                await _left(context)  # turns are still told
        except FullError as error:
            how = ""
            self._metrics.refused.inc()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EpisodeLostError as error:
            how = "lost"
            plays_on = isinstance(error, WorkerLostError)
            await context.abort(grpc.StatusCode.ABORTED if plays_on else grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            if how:
                self._metrics.ended.labels(how).inc()

    async def _play(
        self,
        episode: HostedEpisode | StreamedEpisode,
        first: pb.RunRequest,
        requests: AsyncIterator[pb.RunRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.RunResponse]:
        began = time.monotonic()
        try:
            if isinstance(episode, StreamedEpisode):
                async for response in _play_agent(episode, first, requests):
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
        except _BadRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PlayError as error:
            yield pb.RunResponse(ending=pb.Ending(error=str(error), seconds=time.monotonic() - began))


async def _play_agent(
    episode: StreamedEpisode, first: pb.RunRequest, requests: AsyncIterator[pb.RunRequest]
) -> AsyncIterator[pb.RunResponse]:
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


class _BadRequestError(Exception):
    """A message that the protocol does not allow."""


async def _reply(episode: HostedEpisode, request: pb.RunRequest) -> Moved:
    if request.HasField("answer"):
        return await episode.step(request.answer)
    return await episode.reset(_row(request), request.start.seed)


def _row(request: pb.RunRequest) -> dict[str, object]:
    try:
        row = json.loads(request.start.row_json or "{}")
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"expected start.row_json to be a JSON object; found {error}") from None
    if not isinstance(row, dict):
        raise _BadRequestError(f"expected start.row_json to be a JSON object; found a {type(row).__name__}")
    return row
