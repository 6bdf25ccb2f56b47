"""NeMo Gym's requests as chat completions, turns as its replies, its rewards, and its processes."""

import json
from itertools import count
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_environment.agents.message import spoken
from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import RefusedRequestError, parse
from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError
from polyreme_environment.nemo_gym.responses import chat_body, response
from polyreme_environment.nemo_gym.runner import scored
from polyreme_environment.nemo_gym.servers import plan
from polyreme_environment.nemo_gym.tasks import row

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True, "description": ""}
CALLED = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def turn(text: str, *, is_cut: bool = False) -> AgentTurn:
    return AgentTurn("t1", 7, spoken(text, text, "hermes"), is_cut, 5, 2)


def test_a_request() -> None:
    asked = chat_body(
        {"input": "hi", "instructions": "be kind", "max_output_tokens": 9, "text": {"verbosity": "low"}, "store": None}
    )
    assert asked == {
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
    }
    asked = chat_body({"input": [{"role": "developer", "content": [{"type": "input_text", "text": "a"}]}], "tools": [TOOL]})
    assert asked["messages"] == [{"role": "system", "content": "a"}]
    assert asked["tools"] == [{"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}]
    assert parse(json.dumps(asked).encode()).calls


@pytest.mark.parametrize("text", ["<think>hm</think>yes", "yes", "", CALLED, f"so {CALLED}{CALLED}"])
def test_an_answer_that_comes_back_is_the_one_that_was_given(text: str) -> None:
    given = turn(text)
    reply = response(given, {"model": None})
    assert reply["status"] == "completed" and reply["usage"]["total_tokens"] == 7
    (message,) = chat_body({"input": reply["output"]})["messages"]
    own = given.message
    assert message["content"] == (own["content"] or "")
    assert message.get("tool_calls", []) == own.get("tool_calls", [])


def test_an_answer_that_was_cut() -> None:
    reply = response(turn("ye", is_cut=True), {})
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_result_names_its_call() -> None:
    items = [{"type": "function_call_output", "call_id": "c1", "output": "3"}]
    assert chat_body({"input": items})["messages"] == [{"role": "tool", "tool_call_id": "c1", "content": "3"}]


@pytest.mark.parametrize(
    "body",
    [
        {"input": None},
        {"input": [5]},
        {"input": [{"type": "image_generation_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "max_tool_calls": 3},
        {"input": "x", "tool_choice": "required"},
        {"input": "x", "top_p": 0.5},
        {"input": [{"role": "assistant", "content": "x"}]},
    ],
)
def test_a_request_that_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RefusedRequestError):
        parse(json.dumps(chat_body(body)).encode())


def test_a_reward_and_the_numbers_beside_it() -> None:
    reply: dict[str, Any] = {
        "reward": 1.6,
        "mask_sample": False,
        "failure_kind": None,
        "terminated": True,
        "level": 3,
        "info": {},
        "green": 2,
    }
    assert scored(reply, {"level": 3}) == Result(1.6, {"terminated": 1.0, "green": 2.0})


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"failure_kind": "judge_failed", "failure_reason": "down"}, "failed: judge_failed: down"),
        ({"mask_sample": True}, "failed: mask_sample"),
        ({"reward": float("nan")}, "finite reward"),
        ({"reward": None}, "a number as the reward"),
    ],
)
def test_a_failure_is_no_reward(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected):
        scored({"reward": 0.0, **more}, {})


def test_the_processes_of_a_file() -> None:
    tree = {
        "res": {"resources_servers": {"game": {"entrypoint": "game.py"}}},
        "agent": {"responses_api_agents": {"simple_agent": {"max_steps": 4}}},
        "env": {"environment_servers": {"legacy_agent": {}}},
    }
    ports = count(100)
    found = plan(tree, {"max_steps": 2}, ("10.0.0.1", 9), "/scratch", lambda: next(ports))
    assert [(server.name, server.program, server.port) for server in found.servers] == [
        ("res", "resources_servers/game/game.py", 101),
        ("agent", "responses_api_agents/simple_agent/app.py", 102),
    ]
    assert found.agent_port == 102
    assert found.told["agent"]["responses_api_agents"]["simple_agent"] == {"max_steps": 2, "host": "127.0.0.1", "port": 102}
    assert found.told["policy_model"]["responses_api_models"]["polyreme"]["port"] == 9
    assert "env" not in found.told


def test_two_agents_are_refused() -> None:
    agents: dict[str, Any] = {"simple_agent": {}, "gymnasium_agent": {}}
    tree = {"res": {"resources_servers": {"game": {}}}, "agent": {"responses_api_agents": agents}}
    with pytest.raises(ConfigError, match="one agent"):
        plan(tree, {}, ("h", 1), "/scratch", lambda: 1)


@pytest.mark.parametrize(
    ("given", "shown"),
    [("hi", "hi"), ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "b"), ([], "task 4")],
)
def test_a_row_has_their_row_whole(given: Any, shown: str) -> None:
    task = {"responses_create_params": {"input": given}}
    assert row(task, 4) == {"prompt": shown, "task": task}
