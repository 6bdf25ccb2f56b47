"""The recorded wire of verifiers is what the real package says, and its env server plays episodes."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme.net.http_server import serve_http
from polyreme_environment.foreign_process import run_foreign
from polyreme_environment.verifiers.programs import SERVE, configuration
from polyreme_environment.verifiers.tasks import read_tasks
from polyreme_environment.verifiers.wire import EnvServerClient
from support.environment_stream import serving
from support.own_venv import own_venv
from support.recorded_env_server import FILE

pytestmark = [pytest.mark.real, pytest.mark.slow]  # installs the package

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "guess_number"
GUESSES = ("2", "9", "4")


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    return own_venv("verifiers", tmp_path_factory.mktemp("verifiers")).parent


@pytest.fixture
def config(venv, tmp_path, monkeypatch):
    for name in ("guess.py", "guess_verifiers.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return EnvironmentConfig(
        verifiers="guess_verifiers", venv=venv, options={"player": {"runtime": {"type": "subprocess"}}}, start_timeout=600.0
    )


@asynccontextmanager
async def model(answers, conversation):
    """A model server that says the answers, then refuses. It keeps the last conversation."""
    left = list(answers)

    async def chat(request):
        messages = (await request.json())["messages"]
        if not left:
            return JSONResponse({"error": {"message": "over", "code": "episode_over"}}, 400)
        said = {"role": "assistant", "content": left.pop(0)}
        conversation[:] = [*messages, said]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "message": said, "finish_reason": "stop"}]
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        return JSONResponse({**head, "choices": choices, "usage": usage})

    async with serve_http("127.0.0.1", 0, Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as port:
        yield f"http://127.0.0.1:{port}/v1"


async def recorded_now(config, folder):
    """What the real env server says of a game that is won, one whose second turn is refused, and a task that is none."""
    task = read_tasks(config, 9)[3]["task"]
    address = f"ipc://{folder}/server"
    process = await run_foreign("verifiers", config.venv, SERVE, [configuration(config), address, "1"], ())
    client = EnvServerClient(address)
    found = {}
    try:
        while not await client.is_healthy(1.0):
            pass
        for name, answers, data in (("won", GUESSES, task), ("refused", GUESSES[:1], task), ("invalid", (), {"prompt": "x"})):
            frames, conversation = [], []
            async with model(answers, conversation) as url:
                asked = {"type": "eval", "base_url": url, "api_key_var": "POLYREME_NONE", "headers": {}}
                body = {"task_data": data, "client": asked, "model": "policy", "sampling": {}}
                reply = await client.run(body, lambda delta, frames=frames: frames.append(["delta", delta]))
            found[name] = {"task": data, "conversation": conversation, "frames": [*frames, ["reply", reply]]}
    finally:
        await client.close()
        await process.close()
    return json.loads(json.dumps(found))


def told(recording):
    """What a recording says that does not change from run to run."""
    said = {}
    for name, run in recording.items():
        *deltas, (_, reply) = run["frames"]
        nodes = [node for _, delta in deltas for node in delta.get("nodes", ())]
        fields = {key: value for _, delta in deltas for key, value in delta.get("set", {}).items()}
        head = reply.get("head") or {}
        said[name] = [
            run["task"],
            run["conversation"],
            {key for _, delta in deltas for key in delta} - {"pending", "links"},
            [
                (node["parent"], node["sampled"], node["message"]["role"], node["message"]["content"], sorted(node))
                for node in nodes
            ],
            [error["type"] for _, delta in deltas for error in delta.get("errors", ())],
            {key: fields.get(key) for key in ("rewards", "metrics", "ok", "is_completed", "stop_condition")},
            (reply["success"], sorted(reply), sorted(head), head.get("ok")),
            [(trace["nodes"], trace["calls"]) for trace in reply.get("traces") or ()],
        ]
    return said


async def test_the_recording_is_what_the_package_says(config, tmp_path):
    assert told(await recorded_now(config, tmp_path)) == told(json.loads(FILE.read_text()))


async def test_episodes_of_a_real_env_server(config, tmp_path):
    row = read_tasks(config, 9)[3]
    async with serving(config) as (_, stream):

        async def play():
            episode = stream()
            asks = [await episode.start(**row), *[await episode.answer(guess) for guess in GUESSES[:2]]]
            assert [json.loads(ask.agent.messages_json)[0]["content"] for ask in asks] == ["guess", "higher", "lower"]
            ending = await episode.answer(GUESSES[2])
            assert (ending.reward, dict(ending.parts), ending.error) == (1.0, {"found": 1.0, "guesses": 3.0}, "")

        await asyncio.gather(*(play() for _ in range(8)))


async def test_a_runtime_in_the_cloud_is_never_taken_silently(config):
    with pytest.raises(ConfigError, match=r"environment.options.player.runtime"):
        async with serving(config.model_copy(update={"options": {}})):
            pass
