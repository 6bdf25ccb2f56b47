"""The rewards of NeMo Gym, and its processes."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.nemo_gym.runner import NeMoGymRunner, scored
from polyreme_environment.nemo_gym.servers import plan
from polyreme_environment.nemo_gym.tasks import row
from polyreme_environment.pool import PlayError


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


@pytest.mark.parametrize("said", [b"{", b"[1]", b"[" * 100_000], ids=["broken", "list", "deep"])
async def test_an_agents_answer_that_is_no_object_has_failed(said: bytes) -> None:
    class Saying(NeMoGymRunner):
        async def answer(self, row: dict[str, object], rollout: str) -> bytes:
            return said

    runner = Saying(EnvironmentConfig(nemo_gym="gym.yaml", venv=Path("venv")), EnvironmentMetrics())
    with pytest.raises(PlayError, match="the agent of NeMo Gym: "):
        await runner.run({"task": {}}, "http://any/s/1/v1", "ab12")
    await runner.close()


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
