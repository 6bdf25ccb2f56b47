"""Files that were written for OpenRLHF and verl, played by the environment service with real worker processes."""

import json

import grpc
import pytest

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme_environment.server import serve
from support.environment_stream import serving

AGENT = '''
from typing import Any
import numpy as np
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    """Asks until the label is said."""
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.turns += 1
        right = states["action_text"] == states["label"]
        return {
            "rewards": np.array([1.0 if right else -0.25]),
            "scores": np.array([float(right)]),
            "environment_feedback": "" if right else f"{len(states['observation_text'])} characters so far",
            "done": right,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turns": self.turns},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''
TOOL = '''
from typing import Any, Optional
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Check(BaseTool):
    """Checks an answer."""
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.instances = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        self.instances[instance_id] = {"truth": kwargs["create_kwargs"]["ground_truth"], "said": None}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        instance = self.instances[instance_id]
        instance["said"] = parameters["value"]
        return ToolResponse(text=f"{len(self.instances)} instances"), self.config["price"], {"length": len(instance["said"])}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        instance = self.instances[instance_id]
        return float(instance["said"] == instance["truth"])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.instances[instance_id]
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Checks an answer.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
LISTED = {"class_name": "tools.check.Check", "config": {"type": "native", "price": -0.25}, "tool_schema": SCHEMA}


@pytest.fixture
def config(tmp_path):
    return EnvironmentConfig(file=tmp_path / "foreign.py", workers=1, start_timeout=60.0, worker_memory_mib=1024)


def call(**arguments):
    return f"<tool_call>{json.dumps({'name': 'check', 'arguments': arguments})}</tool_call>"


async def test_an_agent_instance_of_openrlhf(config):
    config.file.write_text(AGENT)
    async with serving(config) as (_, stream):
        episode = stream()
        assert (await episode.start(prompt="2+2=", answer="4")).messages == []
        again = await episode.answer("5")
        assert [(each.role, each.content) for each in again.messages] == [("user", "4 characters so far")]
        assert again.reward == -0.25
        end = await episode.send(answer=pb.Answer(text="4"))
        assert end.reward == 1.0 and dict(end.parts) == {"scores": 1.0, "turns": 2.0}


async def test_a_tool_of_verl(config):
    config.file.write_text(TOOL)
    row = {"prompt": "2+2=", "extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "4"}}}}}
    async with serving(config.model_copy(update={"options": {"tools": [LISTED]}})) as (_, stream):
        for _ in range(2):
            episode = stream()
            (tool,) = json.loads((await episode.start(**row)).tools_json)
            assert tool == SCHEMA
            first = await episode.send(answer=pb.Answer(text="", raw=call(value="15")))
            assert [(each.role, each.content) for each in first.messages] == [("tool", "1 instances")], "the other is released"
            assert first.reward == -0.25
            failed = await episode.send(answer=pb.Answer(text="", raw=call(other="4")))
            assert failed.messages[0].content == "error: KeyError: 'value'" and failed.reward == 0.0
            assert (await episode.send(answer=pb.Answer(text="", raw=call(value="4")))).reward == -0.25
            end = await episode.send(answer=pb.Answer(text="It is 4."))
            assert end.reward == 1.0 and dict(end.parts) == {"check/length": 1.0}
            assert await episode.read() is grpc.StatusCode.OK, "the episode has closed"


async def test_what_has_no_stand_in_is_named(config):
    config.file.write_text(TOOL.replace("rollout_trace import", "tracking import Tracking #"))
    with pytest.raises(ConfigError, match=r"no verl\.utils\.tracking: verl is not installed"):
        async with serve(config):
            pass
