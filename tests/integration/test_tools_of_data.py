"""Tools for data without an environment: declared and called over the service, and scored by the rewards."""

import asyncio
import json
import sys
import threading
from contextlib import AsyncExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import httpx
import pytest

from polyreme.config.environment import EnvironmentConfig, PythonLimits
from polyreme.errors import ConfigError
from polyreme.net.ports import free_port
from polyreme_environment.contract import ContractError, FailedCallError, LostError
from polyreme_environment.server import serve
from polyreme_environment.tools.mcp import McpClient
from polyreme_environment.tools.tool_class import make_class
from polyreme_reward.server import serve as serve_rewards
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.main import orchestrate
from support import guide
from support.environment_stream import serving
from support.episode_world import episode_world
from support.processes import command_line, descendants
from support.tiny_tokenizer import CHAT_TEMPLATE

SHOWS_TOOLS = "{{ tools | map(attribute='function.name') | list }}" + CHAT_TEMPLATE
FILE = '''
def double(number: int) -> int:
    """Doubles.

    Args:
        number: what to double
    """
    return _checked(number) * 2

def _checked(number):
    if number > 100:
        raise LookupError("too much")
    return number
'''
REWARD = """
import json

def score(prompt, response, label, messages):
    said = messages
    assert said[0] == {"role": "user", "content": prompt} and said[-1]["content"] == response and said[-1]["role"] == "assistant"
    return float(len(response))
"""

SHOWN = """
def shown(templated_prompt):
    return 1.0 * ("calculator" in templated_prompt) + 2.0 * ("python" in templated_prompt)
"""


def called(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


async def test_tools_are_declared_and_answered(tmp_path):
    (tmp_path / "more.py").write_text(FILE)
    async with serving(EnvironmentConfig(tools=["calculator", tmp_path / "more.py"])) as (_, stream):
        episode = stream()
        ask = await episode.start(prompt="2*(3+4)?", answer="14")
        assert [tool["function"]["name"] for tool in json.loads(ask.tools_json)] == ["calculator", "double"]
        assert not ask.messages, "the row's own prompt"
        text = called("calculator", expression="2*(3+4)") + called("double", number=101) + called("_checked", number=1)
        ask = await episode.answer(text + called("double", number=4))
        assert [message.content for message in ask.messages] == [
            "14",
            "error: LookupError: too much",
            "error: no tool is called '_checked'; the tools are calculator, double",
            "8",
        ]
        assert [(call.name, bool(call.error)) for call in ask.calls] == [
            ("calculator", False),
            ("double", True),
            ("_checked", True),
            ("double", False),
        ]
        ending = await episode.answer("14")
        assert (ending.reward, ending.error, list(ending.calls)) == (0.0, "", [])


@pytest.mark.parametrize(
    ("code", "error"), [("def _hidden(): ...", "public functions"), (FILE.replace("double", "calculator"), "calculator twice")]
)
async def test_a_file_without_usable_tools_is_refused(tmp_path, code, error):
    (tmp_path / "more.py").write_text(code)
    with pytest.raises(ConfigError, match=error):
        async with serve(EnvironmentConfig(tools=["calculator", tmp_path / "more.py"])):
            pass


async def test_rewards_score_the_last_answer_of_an_episode(redis, run_id, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    sections = {
        "environment": {"tools": ["calculator"]},
        "reward": {"rewards": [{"name": "length", "file": str(tmp_path / "reward.py")}]},
        "data": {"eval": str(tmp_path / "eval.jsonl")},
    }
    async with AsyncExitStack() as life:
        w = await life.enter_async_context(
            episode_world(redis, run_id, tmp_path, {"lengths": Lengths(8)}, chat_template=SHOWS_TOOLS, **sections)
        )
        await life.enter_async_context(serve(w.config.environment, run=w.run))
        await life.enter_async_context(serve_rewards(w.config.reward, run=w.run))
        await asyncio.wait_for(asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas)), 120)
        assert (await w.log.audit()).clean and sorted(w.learner.trained) == [1, 2]
        for group in [group for groups in w.learner.trained.values() for group in groups]:
            for sample in group.samples:
                assert sample.score == len(sample.text)
                assert [(part.name, part.weighted) for part in sample.parts] == [("length", sample.score), ("environment", 0.0)]
                assert [call.status for call in sample.calls] == ["ok"]
        evaluated = [record for _, record in await w.run.records("0", 0) if record["kind"] == "eval"]
        assert evaluated and all(
            record["score"] > 0 and record["parts"].keys() == {"length", "environment"} for record in evaluated
        )


SERVER = '''
import asyncio, os, sys
from mcp.server import MCPServer

server = MCPServer("desk")
kept = []
barrier = asyncio.Barrier(2)

@server.tool()
async def meet() -> str:
    """Waits for another call."""
    return str(await barrier.wait())

@server.tool()
def keep(note: str) -> str:
    """Keeps a note."""
    kept.append(note)
    return f"{len(kept)} notes"

@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise RuntimeError(why)

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

if len(sys.argv) == 1:
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
'''


async def assert_calls_meet(stream):
    """Calls of two episodes are in the server at the same time."""
    episodes = [stream(), stream()]
    for episode in episodes:
        await episode.start(prompt="Meet!", answer="")
    met = await asyncio.gather(*(episode.answer(called("meet")) for episode in episodes))
    assert sorted(ask.messages[0].content for ask in met) == ["0", "1"]


async def test_tools_of_an_mcp_server_and_its_death(tmp_path):
    (tmp_path / "desk.py").write_text(SERVER)
    tools = ["calculator", {"command": [sys.executable, str(tmp_path / "desk.py")]}]
    async with serving(EnvironmentConfig.model_validate({"tools": tools})) as (_, stream):
        episode = stream()
        declared = [tool["function"] for tool in json.loads((await episode.start(prompt="Keep!", answer="")).tools_json)]
        assert [tool["name"] for tool in declared] == ["calculator", "meet", "keep", "fail", "die"]
        assert declared[2]["description"] == "Keeps a note." and declared[2]["parameters"]["required"] == ["note"]
        ask = await episode.answer(called("keep", note="a") + called("fail", why="broken") + called("keep", nota="a"))
        assert ask.messages[0].content == "1 notes" and [bool(call.error) for call in ask.calls] == [False, True, True]
        assert "fail" in ask.messages[1].content, "the server's own text"
        await assert_calls_meet(stream)
        assert await episode.answer(called("die")) is grpc.StatusCode.ABORTED, (
            "the server plays on, and the episode may begin again"
        )
        again = stream()
        await again.start(prompt="Keep!", answer="")
        assert (await again.answer(called("keep", note="a"))).messages[0].content == "1 notes", "a new server"


async def test_an_mcp_server_over_http(tmp_path):
    (tmp_path / "desk.py").write_text(SERVER)
    port = free_port()
    server = await asyncio.create_subprocess_exec(sys.executable, str(tmp_path / "desk.py"), str(port))
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
            while True:
                with suppress(httpx.ConnectError):
                    await http.get(f"http://127.0.0.1:{port}/")
                    break
                await asyncio.sleep(0.1)
        config = EnvironmentConfig.model_validate({"tools": [{"url": f"http://127.0.0.1:{port}/mcp"}]})
        async with serving(config) as (_, stream):
            episode = stream()
            await episode.start(prompt="Keep!", answer="")
            assert (await episode.answer(called("keep", note="a"))).messages[0].content == "1 notes"
            await assert_calls_meet(stream)
    finally:
        server.kill()
        await server.wait()


PINGS, ENDLESS = 1, 2


@contextmanager
def answering(statuses):
    """An MCP server over HTTP, whose tools are these statuses, with which they refuse a call; 0: it hangs; PINGS: it hangs with a stream that
    says it is alive; ENDLESS: its reply is endless. Yields its address and what was asked."""
    asked, ends = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(message["method"])
            status = statuses.get(message.get("params", {}).get("name", message["method"]), 200)
            if not status:
                ends.wait()
                return
            if status < 200:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream" if status == PINGS else "application/json")
                self.end_headers()
                with suppress(OSError):
                    while not ends.wait(0.05 if status == PINGS else 0):
                        self.wfile.write(b": ping\n\n" if status == PINGS else b" " * (1 << 20))
                return
            told = (
                {"error": {"message": f"no: {status}"}}
                if status >= 400
                else {"result": {"tools": [{"name": n} for n in statuses]}}
            )
            body = json.dumps({"id": None if status == 404 else message.get("id"), **told}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield {"url": f"http://127.0.0.1:{server.server_port}/mcp", "command": None}, asked
        finally:
            ends.set()
            server.shutdown()


def test_a_call_that_an_mcp_server_refuses_fails_alone():
    with answering({"bad": 400, "broken": 500, "gone": 404}) as (address, asked):
        tools = McpClient(address, 30.0).tools()
        for name, status in (("bad", 400), ("broken", 500)):
            with pytest.raises(ValueError, match=f"no: {status}"):
                tools[name](None)
        assert asked.count("initialize") == 1
        for _ in range(2):
            with pytest.raises(LostError):
                tools["gone"](None)
        assert asked.count("initialize") == 2, "404 ends a session"


@pytest.mark.parametrize("how", [0, PINGS])
def test_a_call_of_an_mcp_server_has_the_seconds_of_a_step(how):
    with answering({"slow": how}) as (address, asked):
        tools = McpClient(address, 0.2).tools()
        for _ in range(2):
            with pytest.raises(ContractError, match=r"0\.2 s"):
                tools["slow"](None)
        assert asked.count("initialize") == 1, "other calls go on"


def test_an_endless_reply_of_an_mcp_server_is_not_kept():
    with answering({"endless": ENDLESS}) as (address, _), pytest.raises(LostError, match="bytes"):
        McpClient(address, 60.0).tools()["endless"](None)


def test_an_mcp_server_that_refuses_to_begin_has_no_tools():
    with answering({"initialize": 400}) as (address, _), pytest.raises(ConfigError, match="no: 400"):
        McpClient(address, 30.0).tools()


async def test_an_mcp_server_that_cannot_start_is_a_config_error():
    with pytest.raises(ConfigError, match="an MCP server"):
        async with serve(EnvironmentConfig.model_validate({"tools": [{"command": ["/no/such/program"]}]})):
            pass


async def test_a_row_has_the_tools_that_its_source_allows():
    async with serving(EnvironmentConfig(tools=["calculator", "python"])) as (_, stream):
        episode = stream()
        ask = await episode.start(prompt="1+1?", answer="2", allowed_tools=["calculator"])
        assert [tool["function"]["name"] for tool in json.loads(ask.tools_json)] == ["calculator"]
        ask = await episode.answer(called("calculator", expression="1+1") + called("python", code="1+1"))
        assert [message.content for message in ask.messages] == [
            "2",
            "error: no tool is called 'python'; the tools are calculator",
        ]
        plain = stream()
        assert (await plain.start(prompt="Hi!", answer="", allowed_tools=[])).tools_json == ""
        ending = await plain.answer(called("calculator", expression="1+1"))
        assert (ending.error, list(ending.calls)) == ("", []), "text like any other"
        for wrong in (["search"], "calculator", [3]):
            assert "allowed_tools" in (await stream().start(prompt="?", answer="", allowed_tools=wrong)).error


async def test_a_mixed_run_plays_each_source_with_its_tools(redis, run_id, tmp_path):
    """The rows of one source have a tool, those of the other none; held-out rows have tools of their own."""
    (tmp_path / "reward.py").write_text(SHOWN)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"prompt": f"{number}+1=", "answer": "2"}))
    sources = [{"path": str(tmp_path / f"{n}.jsonl"), "tools": tools} for n, tools in enumerate((["calculator"], [], ["python"]))]
    sections = {
        "environment": {"tools": ["calculator", "python"]},
        "reward": {"rewards": [{"name": "shown", "file": str(tmp_path / "reward.py")}]},
        "data": {"train": sources[:2], "eval": sources[2:]},
    }
    async with AsyncExitStack() as life:
        w = await life.enter_async_context(
            episode_world(redis, run_id, tmp_path, {"lengths": Lengths(8)}, chat_template=SHOWS_TOOLS, **sections)
        )
        await life.enter_async_context(serve(w.config.environment, run=w.run))
        await life.enter_async_context(serve_rewards(w.config.reward, run=w.run))
        await asyncio.wait_for(asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas)), 120)
        assert (await w.log.audit()).clean
        groups = [group for groups in w.learner.trained.values() for group in groups]
        assert {("0+1=" in group.prompt, sample.score) for group in groups for sample in group.samples} == {
            (True, 1.0),
            (False, 0.0),
        }
        evaluated = [record for _, record in await w.run.records("0", 0) if record["kind"] == "eval"]
        assert evaluated and {record["score"] for record in evaluated} == {2.0}


async def test_python_keeps_its_state_for_an_episode():
    async with serving(EnvironmentConfig(tools=["python", "calculator"])) as (_, stream):
        first, second = stream(), stream()
        for episode in (first, second):
            declared = json.loads((await episode.start(prompt="?", answer="")).tools_json)
            assert [tool["function"]["name"] for tool in declared] == ["python", "calculator"]
        function = declared[0]["function"]
        assert "10 seconds" in function["description"] and function["parameters"]["required"] == ["code"]
        ask = await first.answer(called("python", code="x = 6\nprint('set')") + called("python", code="x * 7"))
        assert [message.content for message in ask.messages] == ["set", "42"] and not any(call.error for call in ask.calls)
        ask = await second.answer(called("python", code="x") + called("python", cod="x") + called("python", code="x", seconds=9))
        assert ask.messages[0].content.endswith("NameError: name 'x' is not defined")
        assert ask.calls[0].error == "NameError: name 'x' is not defined" and ask.calls[0].seconds > 0
        assert [message.content[:10] for message in ask.messages[1:]] == ["error: mis", "error: got"]
        assert len(interpreters()) == 2
        await first.answer("done")
        second.call.cancel()
        await until_they_end()


async def test_python_beyond_its_time_costs_only_its_state():
    """The calls of one answer share the time of a step, beyond which the worker would be killed."""
    tools = [{"python": {"seconds": 30}}]
    async with serving(EnvironmentConfig.model_validate({"tools": tools, "step_timeout": 10, "workers": 1})) as (_, stream):
        other, episode = stream(), stream()
        for each in (other, episode):
            await each.start(prompt="?", answer="")
            await each.answer(called("python", code="x = 3"))
        ask = await episode.answer(called("python", code="while True: pass") + called("python", code="x"))
        assert "since the call took longer than" in ask.calls[0].error
        assert ask.messages[-1].content.endswith("NameError: name 'x' is not defined")
        assert (await other.answer(called("python", code="x"))).messages[0].content == "3", "it has the same worker"


@pytest.mark.parametrize("seconds", [0.0, 1e-6])
def test_python_without_the_time_to_start_fails_one_call(seconds):
    episode = make_class([{"python": PythonLimits().model_dump()}], 30.0)()
    with pytest.raises(FailedCallError):
        episode.python(seconds, code="1 + 1")
    assert episode.python(60.0, code="1 + 1") == "2"
    episode.close()


async def test_interpreters_end_with_a_killed_worker(tmp_path):
    (tmp_path / "more.py").write_text('def die() -> str:\n    """Ends the worker."""\n    import os\n    os._exit(3)\n')
    async with serving(EnvironmentConfig(tools=["python", tmp_path / "more.py"])) as (_, stream):
        episode = stream()
        await episode.start(prompt="?", answer="")
        await episode.answer(called("python", code="import threading\nthreading.Thread(target=input).start()"))
        assert len(interpreters()) == 1
        assert "exited with status 3" in (await episode.answer(called("die"))).error
        await until_they_end()


def interpreters():
    """The processes in which the tool `python` runs code."""
    return [process for process in descendants() if command_line(process)[1:3] == ["-I", "-S"]]


async def until_they_end():
    for _ in range(6000):
        if not interpreters():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("interpreters outlive their episodes")


async def test_the_guides_calls_of_python_are_answered_so():
    (shown,) = [block.text for block in guide.blocks(guide.ROOT / "docs" / "environments.md") if block.file == "python.txt"]
    async with serving(EnvironmentConfig(tools=["python"])) as (_, stream):
        episode = stream()
        await episode.start(prompt="?", answer="")
        calls = [line for line in shown.splitlines() if line.startswith("<tool_call>")]
        answered = [(await episode.answer(call)).messages[0].content for call in calls]
    assert len(calls) == 2 and shown.strip() == "\n".join(
        f"{call}\n{answer}" for call, answer in zip(calls, answered, strict=True)
    )
