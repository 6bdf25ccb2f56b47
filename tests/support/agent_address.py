"""Session addresses over HTTP: the test is the agent, and answers the episode's stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.net import rpc
from polyreme.net.http_server import serve_http
from polyreme_environment.server import serve

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": SCHEMA}}
FLAT: dict[str, Any] = {"type": "function", "name": "double", "description": "Doubles.", "parameters": SCHEMA}
BLOCK = {"name": "double", "description": "Doubles.", "input_schema": SCHEMA}


class Agents:
    """A program behind a URL whose runs the test takes, and ends with a reply."""

    def __init__(self) -> None:
        self.runs: asyncio.Queue[tuple[Any, asyncio.Future[Response]]] = asyncio.Queue()
        self._ends: list[asyncio.Future[Response]] = []

    async def run(self, request: Request) -> Response:
        ended: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._ends.append(ended)
        await self.runs.put((await request.json(), ended))
        return await ended

    def end(self) -> None:
        for ended in self._ends:
            if not ended.done():
                ended.set_result(Response())


class Opened:
    """One episode: its stream, and its session."""

    def __init__(self, stub: Any, agents: Agents, client: openai.AsyncOpenAI) -> None:
        self.call, self._agents, self.client = stub.Run(), agents, client
        self.asked: list[int] = []

    async def start(self) -> "Opened":
        await self.call.write(pb.RunRequest(start=pb.Start(row_json=json.dumps({"prompt": "p"}), seed=7)))
        asked, self._ended = await asyncio.wait_for(self._agents.runs.get(), 30)
        assert asked["task"] == {"prompt": "p"}
        self.url, self.key = asked["base_url"], asked["api_key"]
        self.client = self.client.with_options(base_url=self.url, api_key=self.key)
        return self

    def ask(self, *messages: Any, **more: Any) -> "asyncio.Future[Any]":
        """A request of the agent, which runs in the background."""
        return asyncio.ensure_future(self.client.chat.completions.create(model="m", messages=messages, **more))

    async def read(self) -> Any:
        response = await asyncio.wait_for(self.call.read(), 30)
        found = getattr(response, response.WhichOneof("body"))
        if response.HasField("ask"):
            self.asked.append(found.agent.number)
        return found

    async def answer(self, text: str = "", number: int = 0, **more: Any) -> None:
        """Answers a request; by default, the newest one."""
        told = {"context_tokens": 5, "tokens": 2, "seconds_left": 60, **more}
        answer = pb.Answer(text=text, number=number or self.asked[-1], **told)
        await self.call.write(pb.RunRequest(answer=answer))

    async def tell(self, text: str, number: int = 0, **more: Any) -> None:
        """Tells what a turn goes on with; by default, the newest one."""
        delta = pb.Delta(text=text, number=number or self.asked[-1], context_tokens=5, **more)
        await self.call.write(pb.RunRequest(delta=delta))

    async def turn(self, text: str, *messages: Any, **more: Any) -> tuple[Any, Any]:
        """A request with the answer `text`, its reply, and what the stream asked for."""
        asking = self.ask(*messages, **more)
        ask = await self.read()
        await self.answer(text)
        return await asking, ask

    async def end(self, result: Any) -> Any:
        self._ended.set_result(result if isinstance(result, Response) else JSONResponse(result))
        return await self.read()


@asynccontextmanager
async def address(security: Any = None, **settings: Any) -> AsyncIterator[Callable[[], Awaitable[Opened]]]:
    """Yields a function that opens an episode."""
    agents = Agents()
    async with serve_http("127.0.0.1", 0, Starlette(routes=[Route("/run", agents.run, methods=["POST"])])) as port:
        given = {"url": f"http://127.0.0.1:{port}/run", "step_timeout": 2.0, "security": security, **settings}
        config = EnvironmentConfig.model_validate(given)
        async with serve(config, grace=0.0) as lease, rpc.connect(lease.address, config.security) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            async with openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0) as client:
                yield lambda: Opened(stub, agents, client).start()
        agents.end()


def asked(ask: Any) -> tuple[int, list[tuple[str, str]]]:
    """The turn that a request follows, and the messages behind that."""
    return ask.agent.after, [(message["role"], message["content"]) for message in json.loads(ask.agent.messages_json)]


async def code_of(request: Awaitable[Any]) -> tuple[int, str | None]:
    """The status and the code of the error that a request gets."""
    with pytest.raises(openai.APIStatusError) as caught:
        await request
    return caught.value.status_code, caught.value.code
