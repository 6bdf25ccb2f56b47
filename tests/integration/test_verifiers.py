"""Episodes of an env server of verifiers: the service with a real process and ZMQ, over a recording of a real one
(`tests/contract/test_verifiers_wire.py`)."""

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
from polyreme.errors import ConfigError, UnavailableError
from support import guide
from support.environment_stream import serving
from support.processes import command_line
from support.recorded_env_server import FILE, install
from support.waiting import until

ROW = {"prompt": "guess", "task": json.loads(FILE.read_text())["won"]["task"]}


@pytest.fixture
def config(tmp_path):
    return EnvironmentConfig(verifiers="guess_verifiers", venv=install(tmp_path / "venv"), step_timeout=20.0)


def env_server():
    """The process of the env server."""
    (found,) = [
        child for child in psutil.Process().children() if any("recorded_env_server" in part for part in command_line(child))
    ]
    return found.pid


def said(ask):
    return ask.agent.after, [message["content"] for message in json.loads(ask.agent.messages_json)]


async def test_the_section_of_the_guide(config, tmp_path):
    guide.write_files("environment-packages.md", tmp_path)
    section = yaml.safe_load((tmp_path / "verifiers.yaml").read_text())["environment"]
    async with serving(EnvironmentConfig.model_validate({**section, "venv": config.venv})) as (_, stream):
        assert said(await stream().start(**ROW)) == (0, ["guess"])


async def test_an_episode_asks_at_the_session_address(config):
    async with serving(config) as (lease, stream):
        episode = stream()
        assert said(await episode.start(**ROW)) == (0, ["guess"])
        assert said(await episode.answer("2")) == (1, ["higher"])
        assert said(await episode.answer("9")) == (2, ["lower"])
        ending = await episode.answer("4")
        assert (ending.reward, dict(ending.parts), ending.error) == (1.0, {"found": 1.0, "guesses": 3.0}, "")
        assert await episode.read() is grpc.StatusCode.OK
        assert lease.facts["versions"][""].startswith("verifiers-")


async def test_episodes_run_side_by_side(config):
    async with serving(config) as (_, stream):
        episodes = [stream() for _ in range(8)]
        for answer in ("2", "9", "4"):
            for episode in episodes:
                ask = await (episode.start(**ROW) if answer == "2" else episode.read())
                assert ask.agent.messages_json
                await episode.write(answer=pb.Answer(text=answer))
        assert [(await episode.read()).reward for episode in episodes] == [1.0] * 8


async def test_an_episode_that_is_not_ok_is_a_failure_though_its_run_succeeded(config):
    async with serving(config) as (_, stream):
        episode = stream()
        await episode.start(**ROW)
        failed = await episode.send(answer=pb.Answer(refused="expected rollout.temperature"))
        assert failed.error.startswith("verifiers: ProviderError: upstream 400")


async def test_at_a_bound_an_episode_ends_with_its_rewards_so_far(config):
    async with serving(config) as (_, stream):
        episode = stream()
        await episode.start(**ROW)
        await episode.answer("2")
        ending = await episode.send(answer=pb.Answer(refused="the episode has reached environment.max_turns", over=True))
        assert (ending.reward, ending.error) == (0.0, "")


@pytest.mark.parametrize(
    ("row", "error"), [({"prompt": "x"}, "expected a column `task`"), ({"task": {"prompt": "x"}}, "verifiers: ValidationError")]
)
async def test_a_row_that_is_no_task(config, row, error):
    async with serving(config) as (_, stream):
        assert (await stream().start(**row)).error.startswith(error)


async def test_an_env_server_that_dies_is_replaced(config):
    async with serving(config) as (lease, stream):
        episode, dead = stream(), env_server()
        await episode.start(**ROW)
        os.kill(dead, signal.SIGKILL)
        assert await episode.answer("2") is grpc.StatusCode.UNAVAILABLE
        asks = []

        async def is_played():
            asks.append(await stream().start(**ROW))
            return not isinstance(asks[-1], grpc.StatusCode)

        await until(is_played)
        assert said(asks[-1]) == (0, ["guess"]) and env_server() != dead
        async with httpx.AsyncClient(base_url=f"http://{lease.http_address}", trust_env=False) as client:
            assert 'workers_replaced_total{reason="exit"} 1.0' in (await client.get("/metrics")).text


async def test_an_episode_whose_caller_leaves_is_cancelled(config, caplog):
    caplog.set_level("INFO")
    async with serving(config) as (_, stream):
        episode = stream()
        await episode.start(**ROW)
        episode.call.cancel()
        await until(lambda: "verifiers: asked to cancel a run" in caplog.messages)


async def test_no_process_is_left(config):
    async with serving(config):
        process = env_server()
    assert not psutil.pid_exists(process)


async def test_a_package_that_cannot_be_served_says_why(config, tmp_path):
    (config.venv / "bin" / "python").write_text("#!/bin/sh\necho no module >&2\nexit 3\n")
    with pytest.raises(ConfigError, match="exited with status 3: no module"):
        async with serving(config):
            pass
    with pytest.raises(ConfigError, match="a virtual environment at"):
        async with serving(config.model_copy(update={"venv": tmp_path})):
            pass


async def test_an_env_server_that_does_not_answer_is_an_error(config):
    (config.venv / "bin" / "python").write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(UnavailableError, match=r"within environment.start_timeout = 0\.2 s"):
        async with serving(config.model_copy(update={"start_timeout": 0.2})):
            pass
