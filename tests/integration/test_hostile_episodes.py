"""Environments and agents that do their worst: endless output and bodies, endless tool calls, connections that close in mid-stream, and
thousands of sessions that nobody ends. What they cost is bounded, and the server plays on."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.net import rpc
from polyreme.net.http_server import BODY_LIMIT, serve_http
from polyreme_environment.server import serve
from support.waiting import until

HOSTILE = '''
import os, sys, time

class Hostile:
    """Does what the answer says."""
    tools = ("look", "wait")

    def reset(self, row, seed):
        return None
    def look(self) -> str:
        """Looks."""
        return "x" * (1 << 28)
    def wait(self) -> str:
        """Waits."""
        time.sleep(0.5)
        return "waited"
    def step(self, message):
        if message == "print":
            for _ in range(1024):
                print("x" * (1 << 20))
        if message == "write":
            for _ in range(1024):
                os.write(1, b"x" * (1 << 20)); os.write(2, b"x" * (1 << 20))
        if message == "return":
            return "x" * (1 << 28), 0.0, False
        return "go on", 0.0, False
'''
CALL = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'


@asynccontextmanager
async def streams(**settings):
    """Yields the server's lease, and a function that begins an episode."""
    async with serve(EnvironmentConfig.model_validate(settings), grace=0.0) as lease, rpc.connect(lease.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

        async def begin():
            call = stub.Run()
            await call.write(pb.RunRequest(start=pb.Start(row_json='{"prompt": "p"}', seed=7)))
            return call

        yield lease, begin


async def said(call, text=None):
    """What the episode's server says, after an answer if there is one."""
    if text is not None:
        await call.write(pb.RunRequest(answer=pb.Answer(text=text, raw=text)))
    response = await asyncio.wait_for(call.read(), 120)
    return getattr(response, response.WhichOneof("body"))


@pytest.fixture
def hostile(tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return {"file": str(path), "step_timeout": 60.0, "worker_memory_mib": 1024, "start_timeout": 60.0}


@pytest.mark.parametrize("act", ["print", "write"])
async def test_gigabytes_of_output_are_not_kept(hostile, act):
    async with streams(**hostile) as (_, begin):
        call, before = await begin(), psutil.Process().memory_info().rss
        await said(call)
        assert (await said(call, act)).messages[0].content == "go on"
        assert psutil.Process().memory_info().rss - before < 64 << 20


async def test_a_message_beyond_its_bound_fails_and_a_result_is_cut(hostile):
    async with streams(**hostile, max_message_chars=1000) as (_, begin):
        call = await begin()
        await said(call)
        (result,) = (await said(call, CALL % "look")).messages
        assert len(result.content) <= 1000
        assert "max_message_chars" in (await said(call, "return")).error


async def test_endless_calls_of_one_answer_have_a_deadline(hostile):
    async with streams(**{**hostile, "step_timeout": 2.0}) as (_, begin):
        call = await begin()
        await said(call)
        assert "environment.step_timeout = 2 s" in (await said(call, CALL % "wait" * 1000)).error


class Agents:
    """A program whose runs never end by themselves."""

    def __init__(self):
        self.runs, self.over = asyncio.Queue(), asyncio.Event()

    async def run(self, request):
        self.runs.put_nowait(await request.json())
        await self.over.wait()
        return JSONResponse(1.0)


@asynccontextmanager
async def addresses(**settings):
    agents = Agents()
    async with (
        serve_http("127.0.0.1", 0, Starlette(routes=[Route("/run", agents.run, methods=["POST"])])) as port,
        streams(url=f"http://127.0.0.1:{port}/run", step_timeout=2.0, **settings) as (lease, begin),
    ):
        yield agents, lease, begin
        agents.over.set()


async def test_a_connection_that_closes_in_mid_stream_and_an_endless_body():
    async with addresses() as (agents, _, begin):
        call = await begin()
        task = await agents.runs.get()
        url, headers = task["base_url"] + "/chat/completions", {"authorization": f"Bearer {task['api_key']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}

        async def endless():
            for _ in range(BODY_LIMIT // (1 << 20) + 2):
                yield b" " * (1 << 20)

        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            asking = asyncio.create_task(http.post(url, json=body))
            assert json.loads((await said(call)).agent.messages_json)[0]["content"] == "hello"
            asking.cancel()
            await call.write(pb.RunRequest(answer=pb.Answer(number=1, seconds_left=60, text="hi", context_tokens=5, tokens=2)))
            assert (await http.post(url, content=endless())).status_code == 413
            async with http.stream("POST", url, json=body) as reply:
                assert reply.status_code == 200  # it closes before the end
            replayed = (await http.post(url, json={**body})).text
            assert '"hi"' in replayed and replayed.rstrip().endswith("[DONE]")
        agents.over.set()
        assert (await said(call)).reward == 1.0


@pytest.mark.parametrize("sessions", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_sessions_that_are_opened_and_abandoned(sessions):
    """They are abandoned in turn, while the next ones open; their keys open nothing afterwards."""
    async with addresses(episodes=100) as (agents, lease, begin):
        open_calls, last = [], {}
        async with httpx.AsyncClient(timeout=60) as http:

            async def played():
                text = (await http.get(f"http://{lease.http_address}/metrics")).text
                return float(text.partition("\npolyreme_environment_episodes ")[2].split()[0])

            async def has_room():
                return await played() < 100

            for _ in range(sessions):
                if len(open_calls) == 100:
                    open_calls.pop(0).cancel()
                    await until(has_room)  # the server has heard of it
                open_calls.append(await begin())
                last = await asyncio.wait_for(agents.runs.get(), 60)
            for call in open_calls:
                call.cancel()
            url, key = last["base_url"] + "/models", {"x-api-key": last["api_key"]}

            async def is_gone():
                return (await http.get(url, headers=key)).status_code == 401

            async def all_are_gone():
                return await played() == 0

            await until(is_gone)
            await until(all_are_gone)
