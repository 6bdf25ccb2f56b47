"""Episodes of NeMo Gym: the service with real processes and HTTP, over recordings of real servers (`tests/contract/test_nemo_gym_wire.py`)."""

import json
import os
import signal

import grpc
import httpx
import psutil
import pytest
import yaml

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme_environment.nemo_gym.tasks import read_rows
from support import guide
from support.environment_stream import serving
from support.processes import command_line
from support.recorded_gym import install
from support.waiting import until

GUESS, WEATHER = range(2)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture
def config(tmp_path):
    return EnvironmentConfig(nemo_gym="recorded.yaml", venv=install(tmp_path / "venv"), step_timeout=20.0)


@pytest.fixture
def rows(config):
    return read_rows(config, 2)


def servers():
    return [child for child in psutil.Process().children() if any("recorded_gym" in part for part in command_line(child))]


def said(ask):
    return ask.agent.after, [message["content"] for message in json.loads(ask.agent.messages_json)]


async def test_an_episode_asks_at_the_session_address(config, rows):
    async with serving(config) as (lease, stream):
        episode = stream()
        assert said(await episode.start(**rows[GUESS])) == (0, ["guess"])
        assert said(await episode.answer("2")) == (1, ["higher"])
        assert said(await episode.answer("9")) == (2, ["lower"])
        ending = await episode.answer("4")
        assert (ending.reward, dict(ending.parts), ending.error) == (1.0, {"terminated": 1.0, "truncated": 0.0}, "")
        assert await episode.read() is grpc.StatusCode.OK
        assert lease.facts["versions"][""].startswith("nemo-gym-")


async def test_each_episode_has_a_session_of_its_own(config, rows):
    async with serving(config) as (_, stream):
        for _ in range(3):
            episode = stream()
            assert said(await episode.start(**rows[GUESS])) == (0, ["guess"])
            for guess in ("2", "9"):
                await episode.answer(guess)
            ending = await episode.answer("4")
            assert (ending.reward, ending.error) == (1.0, "")


async def test_calls_of_tools_continue_their_turn(config, rows):
    async with serving(config) as (_, stream):
        episode = stream()
        ask = await episode.start(**rows[WEATHER])
        (tool,) = json.loads(ask.agent.tools_json)
        assert [message["role"] for message in json.loads(ask.agent.messages_json)] == ["developer", "user"]
        assert tool["function"]["name"] == "get_weather" and tool["function"]["parameters"]["required"] == ["city"]
        result = await episode.answer(CALL)
        assert said(result) == (1, ['{"city":"Rome","weather_description":"The weather in Rome is cold."}'])
        assert [(call.name, call.arguments) for call in result.calls] == [("get_weather", '{"city": "Rome"}')]
        ending = await episode.answer("It is cold.")
        assert (ending.reward, ending.error) == (1.0, "")


async def test_a_refused_request_is_a_failed_episode_and_a_bound_is_not(config, rows):
    async with serving(config) as (_, stream):
        episode = stream()
        await episode.start(**rows[GUESS])
        failed = await episode.send(answer=pb.Answer(refused="expected rollout.temperature"))
        assert failed.error.startswith("the agent of NeMo Gym answered 500") and "expected rollout.temperature" in failed.error
        episode = stream()
        await episode.start(**rows[GUESS])
        ending = await episode.send(answer=pb.Answer(refused="environment.max_turns", over=True))
        assert (ending.reward, ending.error) == (0.0, "")
        assert (await stream().start(prompt="x")).error.startswith("expected a column `task`")


async def test_nobody_reaches_a_session_without_its_key(config, rows):
    async with serving(config) as (lease, stream):
        episode = stream()
        await episode.start(**rows[GUESS])
        async with httpx.AsyncClient(base_url=f"http://{lease.http_address}", trust_env=False) as client:
            for rollout in ("g1-s1", "a"):
                assert (await client.post(f"/ng-rollout/{rollout}/v1/responses", json={"input": "x"})).status_code == 401
        assert said(await episode.answer("2")) == (1, ["higher"])


async def test_servers_that_die_are_replaced_together(config, rows):
    async with serving(config) as (_, stream):
        episode, before = stream(), servers()
        assert len(before) == 2
        await episode.start(**rows[GUESS])
        for server in before:
            os.kill(server.pid, signal.SIGKILL)
        assert await episode.answer("2") is grpc.StatusCode.UNAVAILABLE
        asks = []

        async def is_played():
            asks.append(await stream().start(**rows[GUESS]))
            return not isinstance(asks[-1], grpc.StatusCode)

        await until(is_played)
        assert said(asks[-1]) == (0, ["guess"])
        assert len(servers()) == 2 and not {server.pid for server in before} & {server.pid for server in servers()}
    assert servers() == []


async def test_the_section_of_the_guide(config, rows, tmp_path):
    guide.write_files("environment-packages.md", tmp_path)
    section = yaml.safe_load((tmp_path / "nemo_gym.yaml").read_text())["environment"]
    fitting = {"nemo_gym": config.nemo_gym, "venv": config.venv}
    assert fitting.keys() < section.keys()
    async with serving(EnvironmentConfig.model_validate({**section, **fitting})) as (_, stream):
        assert said(await stream().start(**rows[GUESS])) == (0, ["guess"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "a configuration file of NeMo Gym"),
        ("[]", "found a list"),
        ("agent: {_inherit_from: other}", "found _inherit_from"),
        ("server: {resources_servers: {recorded: {key: '${other}'}}}", r"found \$\{"),
        ("server: {resources_servers: {recorded: {}}}", "a resources server and one agent"),
        ("a: {resources_servers: {other: {}}}\nb: {responses_api_agents: {recorded: {}}}", "the program of a"),
    ],
)
async def test_a_file_that_is_no_environment(config, tmp_path, text, expected):
    file = tmp_path / "gym.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        async with serving(config.model_copy(update={"nemo_gym": str(file)})):
            pass
    with pytest.raises(ConfigError, match="with NeMo Gym at"):
        read_rows(config.model_copy(update={"venv": tmp_path}), 1)
