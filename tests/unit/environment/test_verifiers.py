"""The reward of an episode, from what an env server of verifiers says of it."""

from typing import Any

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError
from polyreme_environment.verifiers.episode import EpisodeDeltas, UnscoredEpisodeError
from polyreme_environment.verifiers.programs import configuration
from polyreme_environment.verifiers.tasks import row

REWARDS = {"found": {"score": 1.0, "weight": 1.0}, "brief": {"score": 0.5, "weight": 0.2}}
ERROR = {"type": "ProviderError", "message": "down"}


def episode(*deltas: dict[str, Any], rewards: Any = REWARDS) -> EpisodeDeltas:
    """An episode of two nodes and a call, and further deltas."""
    found = EpisodeDeltas()
    first: list[dict[str, Any]] = [
        {"nodes": [{}], "pending": [{}]},
        {"nodes": [{}], "calls": [{}], "set": {"rewards": {}}},
        {"set": {"rewards": rewards}},
    ]
    for delta in (*first, *deltas):
        found.add({"trace": "a", **delta})
    return found


def reply(ok: bool = True, errors: Any = (), **counts: int) -> dict[str, Any]:
    return {
        "success": True,
        "error": None,
        "head": {"ok": ok, "errors": list(errors)},
        "traces": [{"id": "a", "nodes": 2, "calls": 1, **counts}],
    }


def test_weighted_rewards_and_metrics() -> None:
    found = episode({"set": {"metrics": {"tries": 3, "late": None}}}).result(reply())
    assert found == Result(1.1, {"found": 1.0, "brief": 0.5, "tries": 3.0})
    assert episode(rewards={}).result(reply()).reward is None


@pytest.mark.parametrize(
    ("deltas", "rewards", "told", "expected"),
    [
        ([{"errors": [ERROR]}], REWARDS, reply(ok=False), "ProviderError: down"),
        ([], REWARDS, reply(ok=False, errors=[ERROR]), "ProviderError: down"),
        ([], REWARDS, reply(ok=False), "not ok"),
        ([], {"found": None}, reply(), r"\['found'\] were not computed"),
        ([], REWARDS, {"success": False, "error": "Cancelled"}, "Cancelled"),
    ],
)
def test_a_failed_episode_has_no_reward(deltas: list[Any], rewards: Any, told: dict[str, Any], expected: str) -> None:
    with pytest.raises(UnscoredEpisodeError, match=expected):
        episode(*deltas, rewards=rewards).result(told)


@pytest.mark.parametrize(
    ("deltas", "rewards", "told", "expected"),
    [
        ([], REWARDS, reply(nodes=3), "expected the trace"),
        ([], REWARDS, reply(calls=0), "expected the trace"),
        ([{"discard": True}], REWARDS, reply(), "expected the trace"),
        ([{"trace": "b"}], REWARDS, {**reply(), "traces": []}, "found 0 traces"),
        ([], {"found": {"score": float("nan"), "weight": 1.0}}, reply(), "finite found of the rewards"),
        ([], {"found": {"score": 1e308, "weight": 10.0}}, reply(), "finite reward"),
    ],
)
def test_an_episode_that_is_not_understood(deltas: list[Any], rewards: Any, told: dict[str, Any], expected: str) -> None:
    with pytest.raises(ContractError, match=expected):
        episode(*deltas, rewards=rewards).result(told)


def test_two_agents_have_no_one_reward() -> None:
    told = reply()
    told["traces"].append({"id": "b", "nodes": 0, "calls": 0})
    with pytest.raises(ContractError, match="found 2 traces"):
        episode({"trace": "b"}).result(told)


@pytest.mark.parametrize(
    ("task", "shown"),
    [
        ({"prompt": "guess"}, "guess"),
        ({"prompt": None, "name": "Wordle-3"}, "Wordle-3"),
        ({"prompt": [{"role": "user", "content": "x"}], "idx": 4}, "task 4"),
    ],
)
def test_a_row_has_its_task_whole(task: dict[str, Any], shown: str) -> None:
    assert row(task) == {"prompt": shown, "task": task}


def test_the_configuration_names_the_taskset() -> None:
    section = {"verifiers": "guess", "venv": "v", "options": {"taskset": {"num_tasks": 3}, "agent": {}}}
    assert configuration(EnvironmentConfig.model_validate(section)) == '{"taskset": {"num_tasks": 3, "id": "guess"}, "agent": {}}'


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"verifiers": "a"}, "`verifiers` and `nemo_gym` need a `venv`"),
        ({"file": "a.py", "venv": "v"}, "`verifiers` and `nemo_gym` need a `venv`"),
        ({"verifiers": "a", "venv": "v", "name": "A"}, "`name` belongs to a `file`"),
        ({"verifiers": "a", "venv": "v", "url": "http://a"}, "set one of them"),
    ],
)
def test_sections_that_are_no_verifiers(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        EnvironmentConfig.model_validate(section)
