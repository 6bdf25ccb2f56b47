"""`polyreme environment test`: an episode with typed answers, and with those of an OpenAI-compatible server."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import UnavailableError
from polyreme.net.http_server import serve_http
from polyreme_environment.environment_test import asked, play
from polyreme_environment.tool_calls import PARSERS, find_calls, write_call
from support import guide
from support.configs import run_config

CALL = '<tool_call>{"name": "search", "arguments": {"words": "Peru"}}</tool_call>'
QUESTION = "Which is the capital of Peru?"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    guide.write_files("environments.md", tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": QUESTION, "answer": a}) + "\n" for a in ("Rio", "Lima")))
    tree = run_config(tmp_path).model_dump(mode="json", exclude_unset=True)
    tree |= {"reward": None, "environment": {"file": "desk.py", "max_turns": 3}}
    tree["data"]["train"] = "rows.jsonl"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def typed(folder: Path, answers: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "polyreme", "environment", "test", "run.yaml", *words]
    return subprocess.run(command, cwd=folder, input=answers, capture_output=True, text=True, timeout=240)


def test_an_episode_is_printed_turn_by_turn(desk: Path) -> None:
    done = typed(desk, f"{CALL}\nLima\n", "--row", "2")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("call ")]
    assert done.returncode == 0, done.stderr
    assert lines == [
        "tool     search(words, limit): Searches the notes.",
        f"user     {QUESTION}",
        f"turn 1   {CALL}",
        "reward   0",
        'tool     ["capital of Peru: Lima"]',
        "turn 2   Lima",
        "reward   1",
        "ended    the environment ended it; reward 1",
    ]
    assert 'call     search {"words": "Peru"}' in done.stdout


def test_the_environment_of_a_held_out_set_is_played(desk: Path) -> None:
    tree = yaml.safe_load((desk / "run.yaml").read_text())
    (desk / "held_out.jsonl").write_text(json.dumps({"prompt": "Is it Lima?", "answer": "Lima"}))
    tree |= {"eval_sets": [{"name": "desk", "data": "held_out.jsonl", "environment": tree.pop("environment")}]}
    tree["reward"] = {"rewards": [{"name": "exact"}]}
    (desk / "run.yaml").write_text(yaml.safe_dump(tree))
    done = typed(desk, "Lima\n", "--set", "desk")
    assert done.returncode == 0 and "user     Is it Lima?" in done.stdout and "reward 1" in done.stdout, done.stderr
    without = typed(desk, "Lima\n")
    assert without.returncode == 2 and "expected a section `environment` in run.yaml" in without.stderr


@pytest.mark.parametrize(
    ("answers", "row", "found", "status"),
    [
        ("", "1", "ended    there is no further answer; reward 0", 0),
        (f"{CALL}\n" * 5, "1", "ended    environment.max_turns = 3; reward 0", 0),
        ("Rio", "3", "the first 2 rows were read", 2),
    ],
)
def test_how_an_episode_may_end(desk: Path, answers: str, row: str, found: str, status: int) -> None:
    done = typed(desk, answers, "--row", row)
    assert (found in done.stdout + done.stderr, done.returncode) == (True, status), done.stderr


def test_an_environment_that_fails_is_told(desk: Path) -> None:
    (desk / "desk.py").write_text("class Desk:\n    def reset(self, row): ...\n    def step(self, message): return 1 / 0\n")
    done = typed(desk, "Rio\n")
    assert done.returncode == 1 and "ended    step: ZeroDivisionError" in done.stdout, done.stderr


AGENT = """
import openai

def run(task, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    said = [{"role": "user", "content": "hello"}]
    for _ in range(task["answer"]):
        try:
            reply = client.chat.completions.create(model="policy", messages=said)
        except openai.BadRequestError as error:
            return -1.0
        said += [reply.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    return float(len(said))
"""


@pytest.mark.parametrize(("asks", "reward"), [(2, 5.0), (3, -1.0)])
async def test_an_agent_asks_for_its_turns(tmp_path: Path, asks: int, reward: float) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    config = EnvironmentConfig(file=tmp_path / "agent.py", function="run", max_turns=2)
    seen, shown = list[list[str]](), list[str]()

    async def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        seen.append([message["content"] for message in messages])
        return f"answer {len(seen)}"

    episode = await play(config, {"prompt": QUESTION, "answer": asks}, [], policy, shown.append)
    assert seen == [["hello"], ["hello", "answer 1", "more"]]
    assert (episode.reward, episode.failed) == (reward, False), shown
    assert ("refused  environment.max_turns = 2" in shown) == (asks == 3)
    assert [line for line in shown if line.startswith(("user", "turn"))][:4] == [
        "user     hello",
        "turn 1   answer 1",
        "user     more",
        "turn 2   answer 2",
    ]


@pytest.mark.parametrize("parser", sorted(PARSERS))
async def test_the_policy_may_be_an_openai_compatible_server(desk: Path, parser: str) -> None:
    requests = []
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"data": [{"id": "policy"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, object]:
        requests.append(await request.json())
        call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"words": "Peru"}'}}
        message = {"content": "Lima"} if len(requests) > 1 else {"content": None, "tool_calls": [call]}
        return {"choices": [{"message": {"role": "assistant", **message}}]}

    config = EnvironmentConfig(file=desk / "desk.py", tool_parser=parser)
    prompt = [{"role": "user", "content": QUESTION}]
    shown: list[str] = []
    async with (
        serve_http("127.0.0.1", 0, app, 5.0, None) as port,
        asked(f"http://127.0.0.1:{port}/v1", None, parser, 9) as policy,
    ):
        episode = await play(config, {"answer": "Lima"}, prompt, policy, shown.append)
    assert (episode.reward, episode.failed) == (1.0, False), shown
    first, second = requests
    assert first["model"] == "policy" and first["tools"][0]["function"]["name"] == "search" and first["messages"] == prompt
    assert second["messages"][-1] == {"role": "tool", "content": '["capital of Peru: Lima"]'}
    with pytest.raises(UnavailableError, match="an OpenAI-compatible server"):
        async with asked(f"http://127.0.0.1:{port}/v1", None, parser, 9):
            pass


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_a_written_call_is_read_again(parser: str) -> None:
    (call,) = find_calls(write_call('a"b', '{"c": [1]}', parser), parser)
    assert (call.name, call.arguments) == ('a"b', {"c": [1]})
