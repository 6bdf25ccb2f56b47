"""Episodes on OpenEnv servers: the service with real sockets, over recordings of real servers (`tests/contract/test_openenv_wire.py`)."""

import asyncio
import json

import grpc
import httpx
import pytest
import yaml

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.net.ports import free_port
from support import guide
from support.environment_stream import serving
from support.recorded_openenv import replayed

GUESS = {"options": {"answer": "$answer"}, "step_timeout": 20.0}


def called(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def seen(body):
    return [(message.role, message.content) for message in body.messages]


async def test_an_episode_is_one_connection():
    async with replayed("guess") as server, serving(EnvironmentConfig(openenv=server.url, **GUESS)) as (lease, stream):
        episode = stream()
        assert seen(await episode.start(answer="4", prompt="guess")) == [], "the row's own prompt"
        first = await episode.answer("2")
        assert (seen(first), first.reward, server.active) == ([("user", "higher")], 0.0, 1)
        assert seen(await episode.answer("9")) == [("user", "lower")]
        ending = await episode.answer("4")
        assert (ending.reward, dict(ending.parts), ending.error) == (1.0, {"guesses": 3.0}, "")
        assert await episode.read() is grpc.StatusCode.OK
        assert (server.active, server.ended) == (0, 1)
        assert lease.facts["versions"][""].startswith("openenv-")
        async with httpx.AsyncClient(base_url=f"http://{lease.http_address}", trust_env=False) as client:
            metrics = (await client.get("/metrics")).text
            assert 'polyreme_environment_call_seconds_count{method="step"} 3.0' in metrics


async def test_the_section_of_the_guide(tmp_path):
    guide.write_files("environment-packages.md", tmp_path)
    section = yaml.safe_load((tmp_path / "openenv.yaml").read_text())["environment"]
    async with replayed("guess") as server:
        fitting = {"openenv": server.url, "action": {"text": "$text"}, "observation": "hint", "options": {"answer": "$answer"}}
        assert fitting.keys() < section.keys()
        async with serving(EnvironmentConfig.model_validate(section | fitting)) as (_, stream):
            episode = stream()
            await episode.start(answer="4")
            assert seen(await episode.answer("2")) == [("user", "higher")]


async def test_a_failed_environment_is_an_error_and_no_reward():
    async with replayed("guess") as server, serving(EnvironmentConfig(openenv=server.url, **GUESS)) as (_, stream):
        failed = await stream().start(answer=None)
        assert failed.error.startswith("reset: EXECUTION_ERROR: int() argument must be")


async def test_tools_are_called_until_one_ends_the_episode():
    async with replayed("ships") as server:
        config = EnvironmentConfig(openenv=server.url, observation="metadata.question", step_timeout=20.0)
        async with serving(config) as (_, stream):
            episode = stream()
            first = await episode.start()
            assert seen(first) == [("user", "How many oars has ship a?")]
            query, _ = (tool["function"] for tool in json.loads(first.tools_json))
            assert query["name"] == "query" and list(query["parameters"]["properties"]) == ["sql"]
            sql = "select oars from ships where name='a'"
            found = await episode.answer(called("query", sql=sql) + called("query", sql="selct") + "<tool_call>{")
            assert [call.result for call in found.calls[:2]] == [
                "[(170,)]",
                "error: Error calling tool 'query': near \"selct\": syntax error",
            ]
            assert [bool(call.error) for call in found.calls] == [False, True, True]
            assert seen(found)[0] == ("tool", "[(170,)]") and seen(found)[2][1].startswith("error: malformed call")
            assert seen(await episode.answer(called("nothing"))) == [("tool", "error: Unknown tool: 'nothing'")]
            ending = await episode.answer(called("submit", answer="170") + called("query", sql="after the end"))
            assert (ending.reward, [call.name for call in ending.calls]) == (1.0, ["submit"])


async def test_a_call_in_a_thought_that_the_prompt_began_is_not_made():
    async with replayed("ships") as server, serving(EnvironmentConfig(openenv=server.url, step_timeout=20.0)) as (_, stream):
        episode = stream()
        await episode.start()
        ending = await episode.send(answer=pb.Answer(text=f"I could {called('nothing')}", in_thought=True))
        assert (ending.reward, list(ending.calls), ending.error) == (0.0, [], "")


async def test_an_answer_that_is_no_action_is_told_so():
    async with replayed("ships") as server:
        action = {"tool_name": "submit", "arguments": "$text"}
        async with serving(EnvironmentConfig(openenv=server.url, action=action, step_timeout=20.0)) as (_, stream):
            episode = stream()
            await episode.start()
            told = await episode.answer("170")
            assert (seen(told), told.reward) == ([("user", "error: arguments: Input should be a valid dictionary")], 0.0)
            ending = await episode.answer('{"answer": "1"}')
            assert (ending.reward, ending.error) == (0.0, "")


async def test_text_that_is_no_unicode_is_replaced():
    async with replayed("ships") as server, serving(EnvironmentConfig(openenv=server.url, step_timeout=20.0)) as (_, stream):
        server.replace = ("[(170,)]", "\\ud800")
        episode = stream()
        await episode.start()
        found = await episode.answer(called("query", sql="select oars from ships where name='a'"))
        assert found.calls[0].result == "?" and seen(found) == [("tool", "?")]


async def test_an_answer_without_a_call_ends_an_episode_of_tools():
    async with replayed("ships") as server, serving(EnvironmentConfig(openenv=server.url)) as (_, stream):
        episode = stream()
        await episode.start()
        ending = await episode.answer("170")
        assert (ending.reward, ending.error) == (0.0, "")


async def test_episodes_spread_over_servers_until_all_are_full():
    async with replayed("guess", 1) as one, replayed("guess", 2) as two:
        config = EnvironmentConfig(openenv=[one.url, two.url], **GUESS)
        async with serving(config) as (_, stream):
            episodes = [stream() for _ in range(3)]
            for episode in episodes:
                await episode.start(answer="4")
            assert (one.active, two.active) == (1, 2)
            for _ in range(20):
                assert await stream().start(answer="4") is grpc.StatusCode.RESOURCE_EXHAUSTED
            for guess in ("2", "9", "4"):
                await episodes[0].answer(guess)
            await episodes[0].read()
            assert seen(await stream().start(answer="4")) == [], "there is room again"


async def test_a_lost_server_costs_its_episodes_a_try():
    async with replayed("guess") as server, serving(EnvironmentConfig(openenv=server.url, **GUESS)) as (lease, stream):
        episode = stream()
        await episode.start(answer="4")
        await server.stop()
        assert await episode.answer("2") is grpc.StatusCode.UNAVAILABLE
        assert await stream().start(answer="4") is grpc.StatusCode.UNAVAILABLE
        async with httpx.AsyncClient(base_url=f"http://{lease.http_address}", trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 503


async def test_a_server_that_does_not_come_is_an_error():
    config = EnvironmentConfig(openenv=f"http://127.0.0.1:{free_port()}", start_timeout=0.1)
    with pytest.raises(UnavailableError, match="an OpenEnv server within"):
        async with serving(config):
            pass


async def test_an_action_that_the_server_does_not_have_is_an_error():
    async with replayed("guess") as server:
        with pytest.raises(ConfigError, match="the fields \\['text'\\]"):
            async with serving(EnvironmentConfig(openenv=server.url, action={"number": "$text"})):
                pass


async def test_a_step_that_hangs_ends_its_episode():
    async with replayed("guess") as server:
        config = EnvironmentConfig(openenv=server.url, options={"answer": "$answer"}, step_timeout=0.5)
        async with serving(config) as (_, stream):
            episode = stream()
            await episode.start(answer="4")
            server.hangs = asyncio.Event()
            assert "environment.step_timeout = 0.5 s" in (await episode.answer("2")).error
            server.hangs.set()
