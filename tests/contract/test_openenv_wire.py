"""The recorded wire of OpenEnv is what the real package says, and the real servers play episodes."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.net.ports import free_port
from support.environment_stream import serving
from support.own_venv import own_venv
from support.recorded_openenv import record, recorded

pytestmark = [pytest.mark.real, pytest.mark.slow]  # installs the package

GAME = Path(__file__).resolve().parents[2] / "examples" / "guess_number" / "openenv_server.py"
SHIPS = '''
import sqlite3, sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Ships(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self._state = FastMCP("ships"), State()
        table = sqlite3.connect(":memory:", check_same_thread=False)
        table.executescript("create table ships(name text, oars int); insert into ships values ('a', 170), ('b', 60);")

        @mcp.tool
        def query(sql: str) -> str:
            """Runs one SQL query on the table ships(name, oars)."""
            return str(table.execute(sql).fetchall())

        @mcp.tool
        def submit(answer: str) -> str:
            """Ends the episode."""
            return "ended"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **row):
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"question": "How many oars has ship a?"})

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction) and action.tool_name == "submit":
            seen.done, seen.reward = True, float(action.arguments.get("answer") == "170")
        return seen

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("only tools")

    @property
    def state(self):
        return self._state

app = create_app(Ships, CallToolAction, CallToolObservation, env_name="ships", max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


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
    (tmp_path / "ships.py").write_text(SHIPS)
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
