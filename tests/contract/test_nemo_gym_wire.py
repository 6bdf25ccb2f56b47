"""The recorded wire of NeMo Gym is what the real package says, and its servers play episodes."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from polyreme.api.v1.environment_pb2 import TurnTokens
from polyreme.config.environment import EnvironmentConfig
from polyreme.net.http_server import serve_http
from polyreme_environment.agents.apis import responses
from polyreme_environment.agents.message import spoken
from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import TOKEN_FIELDS
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.nemo_gym.runner import NeMoGymRunner
from polyreme_environment.nemo_gym.tasks import read_rows
from polyreme_environment.pool import PlayError
from support.environment_stream import serving
from support.own_venv import own_venv
from support.recorded_gym import FILE

pytestmark = [pytest.mark.real, pytest.mark.slow]  # installs the package

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "guess_number"
WEATHER = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
GAMES = {"guess": ("guess_gym.yaml", 3, ("2", "9", "4")), "weather": (WEATHER, 0, (CALL, "It is cold."))}


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    return own_venv("nemo-gym", tmp_path_factory.mktemp("nemo-gym"), "python3.13").parent


@pytest.fixture(params=sorted(GAMES))
def name(request):
    return request.param


@pytest.fixture
def config(venv, name, tmp_path):
    for program in ("guess.py", "guess_gym.py", "guess_gym.yaml", "guess_gym.jsonl"):
        shutil.copy(EXAMPLE / program, tmp_path)
    file = GAMES[name][0]
    return EnvironmentConfig(nemo_gym=file if "/" in file else str(tmp_path / file), venv=venv, start_timeout=240.0)


async def recorded_now(config, name, tokens=False):
    """What the real servers say of a game that is played, and of one whose model refuses. With `tokens`, replies have the fields of tokens."""
    _, number, answers = GAMES[name]
    row = read_rows(config, number + 1)[number]
    found, left = {"row": row["task"], "requests": [], "replies": []}, list(answers)

    async def model(request):
        assert request.path_params["rollout"] == "ab12"
        if not left:
            return JSONResponse({"error": {"message": "over"}}, 400)
        body, text = await request.json(), left.pop(0)
        number = len(found["requests"])
        sampled = TurnTokens(context_ids=range(5), ids=[number, 7], logprobs=[-0.5 - number, -0.25]) if tokens else None
        turn = AgentTurn(f"t{number}", 0, spoken(text, text, "hermes"), False, 5, 2, sampled=sampled)
        found["requests"].append(body)
        found["replies"].append(responses.reply(body | {TOKEN_FIELDS: True} if tokens else body, turn))
        return JSONResponse(found["replies"][-1])

    routes = [Route("/ng-rollout/{rollout}/v1/responses", model, methods=["POST"])]
    async with serve_http("127.0.0.1", 0, Starlette(routes=routes)) as port:
        runner = NeMoGymRunner(config, EnvironmentMetrics())
        await runner.start(f"http://127.0.0.1:{port}")
        try:
            answer = json.loads(await runner.answer(row["task"], "ab12"))
            with pytest.raises(PlayError, match=r"answered 500: .*over"):
                await runner.run(row, "http://any/s/1/v1", "ab12")
        finally:
            await runner.close()
    found["run"] = {key: value for key, value in answer.items() if not key.startswith(("_ng_", "ng_"))}
    return json.loads(re.sub(r'"created_at": [\d.]+', '"created_at": 0', json.dumps(found)))


async def test_the_recording_is_what_the_package_says(config, name):
    assert await recorded_now(config, name) == json.loads(FILE.read_text())[name]


async def test_fields_of_tokens_are_read_kept_and_sent_back(config, name):
    """The package's agents have the tokens of each turn in their answer, and in the input of their next request, which is understood."""
    found = await recorded_now(config, name, tokens=True)
    given = [
        {key: item[key] for key in FIELDS} for reply in found["replies"] for item in reply["output"] if item.keys() >= FIELDS
    ]
    assert [each["generation_token_ids"] for each in given] == [[number, 7] for number in range(len(GAMES[name][2]))]
    for told, items in ((given, found["run"]["response"]["output"]), (given[:-1], found["requests"][-1]["input"])):
        assert [{key: item[key] for key in FIELDS} for item in items if item.get("generation_token_ids")] == told
    read = responses.read({**found["requests"][-1], TOKEN_FIELDS: True}, lambda turn: [])
    assert [message["role"] for message in read.messages].count("assistant") == len(given) - 1 and read.wants_tokens


@pytest.mark.parametrize("name", ["guess"])
async def test_many_episodes_of_the_same_servers(config):
    rows = read_rows(config, 9)
    async with serving(config) as (_, stream):

        async def play(row):
            episode = stream()
            asked = [await episode.start(**row), await episode.answer("5")]
            if row["task"]["answer"] != "5":
                assert json.loads(asked[1].agent.messages_json)[0]["content"] == (
                    "higher" if row["task"]["answer"] > "5" else "lower"
                )
                asked.append(await episode.answer(row["task"]["answer"]))
            assert (asked[-1].reward, asked[-1].error) == (1.0, "")

        for _ in range(2):
            await asyncio.gather(*(play(row) for row in rows))
