"""Classes of OpenRLHF and verl: how they are recognised, what they may return, and the stand-ins of their base classes."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError
from polyreme_environment.foreign_classes.choice import environment_class
from polyreme_environment.foreign_classes.stand_ins import MODULES, BaseTool, ToolResponse, offer_stand_ins

ANSWER = {"rewards": 0.5, "environment_feedback": "again", "done": False}
ROW = {"prompt": "2+2=", "answer": "4"}
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


class Agent:
    """Answers what the options say, and keeps what it gets."""

    def __init__(self, answer: dict[str, Any], begins: str | None = None) -> None:
        self.answer, self.begins, self.got = answer, begins, answer.pop("got", [])

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.got.append(states)
        return {**states, "observation": self.begins or states["observation"]}

    async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.got.append(states)
        return self.answer


class Look(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        return self.config["answers"]


class Native:
    async def reset(self, row: dict[str, Any]) -> None: ...

    async def step(self, message: str) -> tuple[None, float, bool]:
        return None, 0.0, True


@pytest.fixture
def offered() -> Iterator[None]:
    finders = [*sys.meta_path]
    offer_stand_ins()
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] in ("openrlhf", "verl")]:
        del sys.modules[name]


def agent(answer: dict[str, Any], **options: Any) -> Any:
    kind, arguments = environment_class({"Agent": Agent}, None, {"answer": answer, **options}, "a.py")
    return kind(**arguments)


def step(answer: dict[str, Any]) -> Any:
    async def play() -> Any:
        episode = agent(answer)
        await episode.reset(ROW)
        return await episode.step("4")

    return asyncio.run(play())


def test_an_agent_instance_sees_the_conversation_as_text() -> None:
    got: list[dict[str, Any]] = []

    async def play() -> list[Any]:
        episode = agent({**ANSWER, "got": got, "scores": np.array([1.0]), "extra_logs": {"tries": np.array([2])}})
        begun = await episode.reset(
            {**ROW, "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]}
        )
        return [begun, await episode.step("5"), await episode.step("4")]

    begun, first, _ = asyncio.run(play())
    assert begun is None and first == ("again", 0.5, False, {"scores": 1.0, "tries": 2.0})
    assert got[0] == {"observation": "Add.\n\n2+2=", "label": "4"}
    assert got[2] == {"observation_text": "Add.\n\n2+2=5again", "action_text": "4", "label": "4", "sampling_params": None}


def test_an_agent_instance_may_begin_otherwise() -> None:
    assert asyncio.run(agent(ANSWER | {}, begins="Guess!").reset(ROW)) == "Guess!"
    with pytest.raises(ContractError, match="a column `prompt` for an AgentInstance; found the columns"):
        asyncio.run(agent(ANSWER | {}).reset({"question": "?"}))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"sampling_params": object()}, "no sampling_params from step, since the run's configuration"),
        ({"environment_images": [b""]}, "no environment_images from step"),
        ({"reward": 1.0}, "found 'reward'"),
        ({"rewards": float("nan")}, "a finite rewards of step"),
        ({"extra_logs": {"a": "b"}}, "a number as the a of step"),
        ({"environment_feedback": None}, "a text as environment_feedback"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ContractError, match=error):
        step({**ANSWER, **more})
    assert step({**ANSWER, "sampling_params": None})[1] == 0.5


def test_a_native_class_stays_as_it_is() -> None:
    assert environment_class({"Native": Native, "BaseTool": dict}, None, {}, "a.py") == (Native, {})
    with pytest.raises(ConfigError, match="found Native, Look"):
        environment_class({"Native": Native, "Look": Look}, None, {}, "a.py")


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((ToolResponse(image=[b""]), 0.0, {}), "no images; found image"),
        ("text", "to return .response, reward, metrics."),
        ((3, 0.0, {}), "a ToolResponse from look.execute; found 3"),
        ((ToolResponse(text="a"), float("inf"), {}), "finite reward of look.execute"),
    ],
)
def test_a_tool_that_answers_otherwise_is_refused(answers: object, error: str) -> None:
    listed = {"class_name": "tools.Look", "config": {"answers": answers}, "tool_schema": SCHEMA}
    kind, _ = environment_class({"Look": Look}, None, {"tools": [listed]}, "a.py")

    async def play() -> None:
        episode = kind()
        await episode.reset(ROW)
        await episode.look()

    with pytest.raises(ContractError, match=error):
        asyncio.run(play())


@pytest.mark.usefixtures("offered")
async def test_each_instance_is_released_though_one_raises() -> None:
    class Held(Look):
        async def release(self, instance_id: str, **_: Any) -> None:
            released.append(self.name)
            raise ValueError(self.name)

    released = list[str]()
    schemas = [{**SCHEMA, "function": {**SCHEMA["function"], "name": name}} for name in "abc"]
    listed = [{"class_name": "tools.Held", "tool_schema": schema} for schema in schemas]
    kind, _ = environment_class({"Held": Held}, None, {"tools": listed}, "a.py")
    episode = kind()
    await episode.reset(ROW)
    with pytest.raises(ValueError, match="a"):
        await episode.close()
    assert released == ["c", "b", "a"]


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "Look has no tool_schema"),
        ({"tool": []}, "the option `tools`"),
        ({"tools": [{"class_name": "a.See", "tool_schema": SCHEMA}]}, "a tool class See in a.py; found Look"),
        ({"tools": [{"class_name": "a.Look", "tool_schema": {"type": "function"}}]}, "function"),
        ({"tools": 2 * [{"class_name": "a.Look", "tool_schema": SCHEMA}]}, "another name of the tool look"),
    ],
)
def test_options_are_those_of_a_tools_file(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environment_class({"Look": Look}, None, options, "a.py")


@pytest.mark.usefixtures("offered")
def test_stand_ins_are_offered_and_nothing_else() -> None:
    for module, names in MODULES.items():
        scope: dict[str, Any] = {}
        exec(f"from {module} import {', '.join(names)}", scope)
        assert names.items() <= scope.items()
    for line, missing in (
        ("from verl.tools.schemas import Other", "no Other in verl.tools.schemas: verl is not installed"),
        ("from verl.utils import reward_score", "no verl.utils.reward_score: verl is not installed"),
        ("import openrlhf.trainer.ppo", "no openrlhf.trainer: openrlhf is not installed"),
    ):
        with pytest.raises(ImportError, match=missing):
            exec(line)
