"""Environments and agents that do their worst: endless output and bodies, endless tool calls, connections that close in mid-stream, and
thousands of sessions that nobody ends. What they cost is bounded, and the server plays on."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import grpc
import httpx
import msgpack
import psutil
import pytest
import zmq.asyncio
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.environment import EnvironmentConfig
from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme.net import rpc
from polyreme.net.http_server import BODY_LIMIT, serve_http
from polyreme_environment import grpc_service
from polyreme_environment.server import serve
from polyreme_environment.verifiers.episode import EpisodeDeltas
from polyreme_environment.verifiers.wire import REPLY_BYTES, EnvServerClient
from support.environment_stream import serving
from support.recorded_openenv import replayed
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
        if message == "raise":
            raise ValueError("half \\ud800 of a character")
        if message == "name":
            return "over", 1.0, True, {"half \\ud800": 2.0}
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


@pytest.mark.parametrize(("act", "error", "parts"), [("raise", "half ? of a character", {}), ("name", "", {"half ?": 2.0})])
async def test_half_a_character_reaches_the_caller_as_a_mark(hostile, act, error, parts):
    async with streams(**hostile) as (_, begin):
        await said(call := await begin())
        ending = await said(call, act)
        assert error in ending.error and bool(error) == bool(ending.error) and dict(ending.parts) == parts


async def test_endless_calls_of_one_answer_have_a_deadline(hostile):
    async with streams(**{**hostile, "step_timeout": 2.0}) as (_, begin):
        call = await begin()
        await said(call)
        assert "environment.step_timeout = 2 s" in (await said(call, CALL % "wait" * 1000)).error


@asynccontextmanager
async def env_server(folder, answer):
    """A client of a server with the wire of verifiers, which sends the messages of `answer` for each run."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind(f"ipc://{folder}/server")

        async def answered():
            while True:
                peer, name, method, body = await server.recv_multipart()
                for message in answer(msgpack.unpackb(body)) if method == b"run" else ():
                    await server.send_multipart([peer, name, *message])

        answering, client = asyncio.create_task(answered()), EnvServerClient(f"ipc://{folder}/server")
        try:
            yield client
        finally:
            await client.close()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


@pytest.mark.parametrize(
    "messages",
    [
        [[b"reply", b"\xc1"]],
        [[b"reply", b"\x91" * 100_000]],
        [[b"reply", msgpack.packb([1])]],
        [[b"reply"]],
        [[b"delta", msgpack.packb({"trace": []})]],
        [[b"delta", msgpack.packb({"trace": "a", "errors": 5})]],
        [[b"delta", msgpack.packb({"trace": "a", "set": {"x": b"x" * (1 << 20)}})]] * (REPLY_BYTES // (1 << 20)),
    ],
    ids=["broken", "deep", "list", "short", "trace", "errors", "gigabytes"],
)
async def test_what_an_env_server_says_wrongly_ends_its_run_alone(tmp_path, messages):
    good = [[b"reply", msgpack.packb({"fine": True})]]
    async with env_server(tmp_path, lambda body: messages if body["bad"] else good) as client, asyncio.timeout(60):
        with pytest.raises(INVALID_MESSAGE):
            await client.run({"bad": True}, EpisodeDeltas().add)
        assert await client.run({"bad": False}, EpisodeDeltas().add) == {"fine": True}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "INVALID_REPLY"),
        ("[" * 100_000, "INVALID_REPLY"),
        ('{"type": "observation", "data": {"reward": "high", "done": false, "observation": {}}}', "expected"),
        ("x" * (1 << 23), grpc.StatusCode.UNAVAILABLE),
        (None, grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["broken", "deep", "reward", "gigabytes", "closed"],
)
async def test_what_an_openenv_server_says_wrongly_ends_its_episode_alone(text, error):
    async with (
        replayed("guess") as server,
        serving(EnvironmentConfig(openenv=server.url, options={"answer": "$answer"})) as (_, stream),
    ):
        bad, other = stream(), stream()
        await bad.start(answer="4")
        await other.start(answer="4")
        server.says = [text]
        found = await bad.answer("2")
        assert found is error if isinstance(error, grpc.StatusCode) else error in found.error, found
        assert (await other.answer("2")).messages


DESK = """
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    result = {"tools": [{"name": "keep"}]} if asked["method"] == "tools/list" else {"content": [{"text": "kept"}]}
    if asked["method"] == "tools/call" and "say" in asked["params"]["arguments"]:
        print(eval(asked["params"]["arguments"]["say"]), flush=True)
    elif "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize("say", ["'{'", "'[' * 100_000", "[1]", "'x' * (17 << 20)", "sys.exit()"])
async def test_what_an_mcp_server_says_wrongly_ends_its_episode_alone(tmp_path, say):
    (tmp_path / "desk.py").write_text(DESK)
    tools = [{"command": [sys.executable, str(tmp_path / "desk.py")]}]
    async with serving(EnvironmentConfig.model_validate({"tools": tools})) as (_, stream):
        for arguments in ({"say": say}, {}):
            episode = stream()
            await episode.start(prompt="Keep!", answer="")
            call = json.dumps({"name": "keep", "arguments": arguments})
            found = await episode.answer(f"<tool_call>{call}</tool_call>")
            if arguments:
                assert found is grpc.StatusCode.ABORTED, found
            else:
                assert found.messages[0].content == "kept"


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


async def test_an_agents_call_is_ended_by_its_caller_which_still_writes(monkeypatch):
    monkeypatch.setattr(grpc_service, "_CLOSE_SECONDS", 60.0)
    async with addresses() as (agents, _, begin):
        call = await begin()
        agents.over.set()
        assert (await said(call)).reward == 1.0
        ending = asyncio.ensure_future(call.code())
        await asyncio.wait({ending}, timeout=0.3)
        assert not ending.done()
        call.cancel()
        assert await ending is grpc.StatusCode.CANCELLED


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


@pytest.mark.parametrize("sessions", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])])
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
