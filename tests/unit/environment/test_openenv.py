"""What answers are to an OpenEnv server, and its observations to the policy."""

import json
from typing import Any

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError
from polyreme_environment.openenv.mapping import action_form, begun, observed, reset_fields, tool_result, tool_schemas


def schema(required: list[str], **types: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"properties": {"metadata": {"type": "object"}, **properties}, "required": required}


@pytest.mark.parametrize(
    ("declared", "actions", "action"),
    [
        (None, schema(["number"], number="integer"), {"number": "[5]"}),
        (None, schema([], text="string"), {"text": "[5]"}),
        (None, schema(["code"], code="string", seconds="number"), {"code": "[5]"}),
        ({"code": "$text", "seconds": 2}, schema(["code"], code="string", seconds="number"), {"code": "[5]", "seconds": 2}),
        (None, schema(["moves"], moves="array"), {"moves": [5]}),
        ({"ask": {"q": ["$text", "as $text"]}}, schema(["ask"], ask="object"), {"ask": {"q": ["[5]", "as $text"]}}),
        (None, schema(["tool_name"], type="string", tool_name="string", arguments="object"), None),
        (None, schema([]), None),
    ],
)
def test_an_answer_as_an_action(declared: dict[str, Any] | None, actions: dict[str, Any], action: dict[str, Any] | None) -> None:
    assert action_form(declared, actions).action("[5]") == action


def test_what_is_no_json_object_stays_a_text() -> None:
    form = action_form(None, schema(["moves"], moves="array"))
    assert [form.action(text) for text in ("5", "[", "[" * 100_000)] == [{"moves": text} for text in ("5", "[", "[" * 100_000)]


@pytest.mark.parametrize(
    ("declared", "actions", "expected"),
    [
        (
            None,
            schema(["row", "column"], row="integer", column="integer"),
            r"environment.action with the fields \['row', 'column'\]",
        ),
        (None, schema([], row="integer", column="integer"), "environment.action with the fields"),
        ({"text": "$text"}, schema(["number"], number="integer"), r"the fields \['number'\] of the server's actions"),
        ({"row": "$text"}, schema(["row", "column"], row="integer", column="integer"), "all required fields"),
    ],
)
def test_an_action_that_does_not_fit(declared: dict[str, Any] | None, actions: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        action_form(declared, actions)


def test_columns_of_the_row_in_reset() -> None:
    options = {"level": "$level", "fixed": [1, {"price": "$5"}]}
    assert reset_fields(options, {"level": 3}) == {"level": 3, "fixed": [1, {"price": "$5"}]}
    with pytest.raises(ContractError, match=r"the columns \['level'\] of environment.options"):
        reset_fields(options, {"word": "x"})


@pytest.mark.parametrize(
    ("observation", "path", "said"),
    [
        ({"hint": "up", "metadata": {}}, None, "up"),
        ({"hint": "up", "tries": 2}, None, '{"hint": "up", "tries": 2}'),
        ({"hint": "up", "tries": 2}, "hint", "up"),
        ({"metadata": {"question": "why?"}}, "metadata.question", "why?"),
        ({"board": [[1, 2]]}, None, "[[1, 2]]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, None, [{"role": "user", "content": "hi"}]),
        ({"hint": "", "metadata": {}}, None, None),
        ({"metadata": {"a": 1}}, None, None),
        ({"hint": "up"}, "board", None),
    ],
)
def test_what_the_policy_sees_first(observation: dict[str, Any], path: str | None, said: Any) -> None:
    assert begun({"observation": observation, "reward": None, "done": False}, path) == said


def test_a_step() -> None:
    reply = {"observation": {"hint": "up"}, "reward": True, "done": False, "metadata": {"tries": 2, "won": False, "name": "x"}}
    seen = observed(reply, "hint", 100)
    assert (seen.messages, seen.reward, seen.done, seen.parts) == ([("user", "up")], 1.0, False, {"tries": 2.0, "won": 0.0})
    assert observed({"observation": {}, "reward": None, "done": True}, "hint", 100).done


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"observation": {"hint": "up"}, "reward": float("nan"), "done": False}, "finite reward"),
        ({"observation": {"hint": "up" * 100}, "reward": 0, "done": False}, "max_message_chars = 100"),
        ({"observation": {"hint": "up"}, "reward": "much", "done": False}, "a number as the reward"),
        ({"observation": {"hint": ""}, "reward": 0, "done": False}, "an observation from step"),
        ({"observation": {"word": "up"}, "reward": 0, "done": False}, "environment.observation = hint"),
        ({"observation": None, "reward": 0, "done": False}, "expected an observation"),
        ({"observation": {"hint": "up"}, "reward": 0, "done": False, "metadata": {"x": float("inf")}}, "finite x of step"),
    ],
)
def test_a_step_that_is_not_understood(reply: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected):
        observed(reply, "hint", 100)


def test_an_episode_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ContractError, match="goes on after reset"):
        begun({"observation": {"hint": "up"}, "done": True}, None)


@pytest.mark.parametrize("key", ["inputSchema", "input_schema"])
def test_tools_of_both_releases_of_mcp(key: str) -> None:
    (tool,) = tool_schemas({"result": {"tools": [{"name": "query", "description": None, key: {"type": "object"}}]}})
    assert tool["function"] == {"name": "query", "description": "", "parameters": {"type": "object"}}
    with pytest.raises(ContractError, match="no MCP"):
        tool_schemas({"error": {"code": -32603, "message": "no MCP"}, "result": None})


@pytest.mark.parametrize(
    ("observation", "result"),
    [
        (
            {"result": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "is_error": False}},
            ("a\nb", ""),
        ),
        ({"result": {"content": [{"type": "text", "text": "no"}], "is_error": True}}, ("", "no")),
        ({"result": None, "error": {"error_type": "timeout", "message": "late"}}, ("", "late")),
        ({"result": {"rows": [1]}}, ('{"rows": [1]}', "")),
        ({"result": 5}, ("5", "")),
    ],
)
def test_results_of_tools(observation: dict[str, Any], result: tuple[str, str]) -> None:
    assert tool_result({"observation": observation}) == result


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"openenv": "http://a:1", "file": "a.py"}, "set one of them"),
        ({"openenv": []}, "set one of them"),
        ({"openenv": "http://a:1", "function": "run"}, "`function` belongs to a `file`"),
        ({"file": "a.py", "observation": "hint"}, "`observation` belongs to `openenv`"),
        ({"openenv": "a:1"}, "String should match pattern"),
    ],
)
def test_sections_that_are_no_openenv(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        EnvironmentConfig.model_validate(section)
    assert json.dumps(EnvironmentConfig.model_validate({"openenv": "https://a/b"}).openenv) == '["https://a/b"]'
