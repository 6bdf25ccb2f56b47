"""The recorded wire of OpenEnv is what the real package says, and the real servers play episodes."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.net.ports import free_port
from support import guide
from support.environment_stream import serving
from support.own_venv import own_venv
from support.recorded_openenv import record, recorded

pytestmark = [pytest.mark.real, pytest.mark.slow]  # installs the package

GAME = Path(__file__).resolve().parents[2] / "examples" / "guess_number" / "openenv_server.py"


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return own_venv("openenv", tmp_path_factory.mktemp("openenv"))


@contextmanager
def server(commands, program):
    port = free_port()
    process = subprocess.Popen([commands / "python", program, str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(params=["guess", "ships"])
def name(request):
    return request.param


@pytest.fixture
def url(commands, name, tmp_path):
    guide.write_files("environment-packages.md", tmp_path)
    with server(commands, GAME if name == "guess" else tmp_path / "ships.py") as url:
        yield url


async def test_the_recording_is_what_the_package_says(name, url):
    config = EnvironmentConfig(openenv=url, start_timeout=120.0)
    async with serving(config):  # it is there
        sent = [[message for message, _ in exchanges] for exchanges in recorded(name)["conversations"]]
        assert await record(url, sent) == recorded(name)


async def test_a_server_with_room_for_one(commands, tmp_path):
    """A real server that is full says so before it closes, and has room again at once after an episode."""
    (tmp_path / "game.py").write_text(GAME.read_text().replace("max_concurrent_envs=256", "max_concurrent_envs=1"))
    (tmp_path / "guess.py").write_text(GAME.with_name("guess.py").read_text())
    with server(commands, tmp_path / "game.py") as url:
        config = EnvironmentConfig(openenv=url, start_timeout=120.0, options={"answer": "$answer"})
        async with serving(config) as (_, stream):
            for _ in range(8):
                episode = stream()
                await episode.start(answer="4")
                assert (await stream().start()).name == "RESOURCE_EXHAUSTED"
                ending = await episode.answer("4")
                assert (ending.reward, dict(ending.parts)) == (1.0, {"guesses": 1.0})
                assert (await episode.read()).name == "OK"
