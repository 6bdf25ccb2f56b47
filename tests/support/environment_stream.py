"""An environment service, and episodes on it that are driven by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.experience.leases import Lease
from polyreme.net import rpc
from polyreme_environment.server import serve


class Stream:
    """One episode, driven by hand."""

    def __init__(self, stub: environment_pb2_grpc.EnvironmentServiceStub) -> None:
        self.call = stub.Run()
        self._newest = 0  # request of an agent

    async def start(self, **row: Any) -> Any:
        """Begins with a row. Returns what `read` does."""
        return await self.send(start=pb.Start(row_json=json.dumps(row), seed=7))

    async def answer(self, text: str) -> Any:
        """Answers. Returns what `read` does."""
        return await self.send(answer=pb.Answer(text=text))

    async def send(self, **body: Any) -> Any:
        """Sends a message. Returns what `read` does."""
        await self.write(**body)
        return await self.read()

    async def write(self, **body: Any) -> None:
        """Sends a message; an answer is for an agent's newest request."""
        if "answer" in body:
            body["answer"].MergeFrom(pb.Answer(number=self._newest, seconds_left=60.0))
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended, as the read says
            await self.call.write(pb.RunRequest(**body))

    async def read(self) -> Any:
        """The next Ask or Ending, or the status code if there is none."""
        try:
            response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            return error.code()
        if response is grpc.aio.EOF:
            return await self.call.code()
        found = getattr(response, response.WhichOneof("body"))
        self._newest = found.agent.number if response.HasField("ask") else 0
        return found


async def started(stream: Callable[[], Stream]) -> Any:
    """The first message of an episode, once the server has room for it."""
    for _ in range(500):
        if (found := await stream().start()) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the server stayed full")


@asynccontextmanager
async def serving(config: EnvironmentConfig, **options: Any) -> AsyncIterator[tuple[Lease, Callable[[], Stream]]]:
    """A service, until the end of the block: its lease, and what begins an episode. `options` as of `serve`."""
    async with serve(config, **options) as lease:
        channel = rpc.connect(lease.address, config.security)
        try:
            yield lease, partial(Stream, environment_pb2_grpc.EnvironmentServiceStub(channel))
        finally:
            await channel.close()
