"""What `config check` says about an environment, and which sections go with one."""

from pathlib import Path
from typing import Any

import pytest

from polyreme.config.data import DataConfig, WeightedSource
from polyreme.config.environment import EnvironmentConfig
from polyreme.config.evaluation import EvaluationSet
from polyreme.config.load import resolve_paths
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme_environment.checks import check
from support.configs import run_config

TOOL = "class Tool:\n" + "".join(
    f"    def {name}(self): ...\n" for name in ("get_openai_tool_schema", "create", "execute", "calc_reward", "release")
)
GOOD = "class Guess:\n    def reset(self, row): ...\n    async def step(self, message): ...\n"


def played(folder: Path, code: str | None, **section: Any) -> RunConfig:
    file = folder / "environment.py"
    if code is not None:
        file.write_text(code)
    return run_config(folder, reward=None, environment=EnvironmentConfig(file=file, **section))


@pytest.mark.parametrize(
    ("code", "section"),
    [
        (GOOD, {}),
        (GOOD + GOOD.replace("Guess", "Other"), {"name": "Other"}),
        (GOOD + "class _Hidden:\n    def reset(self): ...\n    def step(self): ...\n", {}),
        ("from other import Base\nclass Guess(Base):\n    pass\n", {}),
        ("from other import *\n", {"name": "Guess"}),
        ("class Tools:\n    def reset(self, row): ...\n    def search(self): ...\n", {}),
        (TOOL, {}),
        (GOOD + "class Board:\n    def reset(self): ...\n    def move(self): ...\n", {}),
        ("async def run(task, base_url, api_key): ...\n", {"function": "run"}),
        ("from other import run\n", {"function": "run"}),
    ],
)
def test_an_environment_that_can_be_loaded(tmp_path: Path, code: str, section: dict[str, Any]) -> None:
    assert list(check(played(tmp_path, code, **section))) == []


@pytest.mark.parametrize(
    ("code", "section", "message"),
    [
        (None, {}, "a Python file"),
        ("class Guess(", {}, "valid Python"),
        ("def reset(): ...", {}, "Write one"),
        ("class Idle:\n    def reset(self, row): ...\n    def _search(self): ...\n", {}, "Write one"),
        (GOOD + GOOD.replace("Guess", "Other"), {}, r"Set environment\.name"),
        (GOOD, {"name": "Other"}, r"Fix environment\.name"),
        ("def other(): ...\n", {"function": "run"}, r"a function run in .*Fix environment\.function"),
    ],
)
def test_an_environment_that_cannot(tmp_path: Path, code: str | None, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(check(played(tmp_path, code, **section)))


BUDGET: dict[str, Any] = {"rollout": {"tokens_per_iteration": 4}, "max_staleness": 10_000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"file": None, "tools": ["calculator"]}}, "environment.tools needs the section `reward`"),
        ({"environment": {"tools": ["calculator"]}}, "set one of them"),
        ({"environment": {"file": None, "tools": [{"command": ["x"]}]}}, "environment.tools"),
        ({"trainer": {"moe": {"replay_routes": True}}}, "replay_routes does not go"),
        ({"data": {"template": "none"}}, "needs data.template: chat"),
        ({"data": {"eval": "eval.jsonl"}, "eval_answers": 2, "eval_best": "pass@2"}, "needs environment.correctness"),
        ({"algorithm": {"advantage": {"kind": "per_part"}}}, "an advantage per reward"),
        ({"rollout": {"tokens_per_iteration": 4}, "max_staleness": 8}, "the longest episode .* needs max_staleness"),
        (BUDGET | {"placement": "colocated"}, "needs placement: separate"),
        (BUDGET | {"environment": {"function": "run"}}, "does not go with an agent"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = run_config(tmp_path).model_dump(mode="json", exclude_unset=True)
    tree = {**config, "reward": None, "environment": {"file": "environment.py"}}
    for key, value in changes.items():
        tree[key] = {**(tree.get(key) or {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(tree)


def test_files_of_tools_are_found_and_read_before_the_run(tmp_path: Path) -> None:
    run_config(tmp_path)
    tree = {"environment": {"tools": ["calculator", "more.py"]}}
    resolve_paths(tree, RunConfig, tmp_path)
    assert tree["environment"]["tools"] == ["calculator", str(tmp_path / "more.py")]
    rewards = {"reward": {"rewards": [{"name": "exact"}]}}
    config = RunConfig.model_validate({**run_config(tmp_path).model_dump(mode="json", exclude_unset=True), **tree, **rewards})
    with pytest.raises(ConfigError, match=r"Fix environment\.tools"):
        list(check(config))
    (tmp_path / "more.py").write_text("def _hidden(): ...\n")
    with pytest.raises(ConfigError, match="public functions"):
        list(check(config))
    (tmp_path / "more.py").write_text("def double(number: int) -> int: ...\n")
    assert list(check(config)) == []


def test_the_runs_security_is_the_environments(tmp_path: Path) -> None:
    tree = run_config(tmp_path).model_dump(mode="json", exclude_unset=True)
    tree |= {"reward": None, "environment": {"file": "environment.py"}, "security": {"token_env": "TOKEN"}}
    tree["eval_sets"] = [{"name": "own", "data": "x", "environment": {"file": "environment.py"}}]
    config = RunConfig.model_validate(tree)
    assert [each.security for each in config.environments.values()] == [config.security] * 2
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    own = {"security": {"token_env": "OTHER"}}
    config = RunConfig.model_validate(tree | {"environment": {"file": "environment.py", **own}})
    assert [each.security for each in config.environments.values()] == [config.environment_security] * 2
    tree["eval_sets"][0]["environment"] |= own
    with pytest.raises(ValueError, match="have one server"):
        RunConfig.model_validate(tree)


def test_the_environment_of_a_held_out_set_is_checked(tmp_path: Path) -> None:
    section = EnvironmentConfig(file=tmp_path / "environment.py")
    own = EvaluationSet(name="own", data=tmp_path / "held_out.jsonl", environment=section)
    config = run_config(tmp_path, eval_sets=[own])
    with pytest.raises(ConfigError, match="a Python file"):
        list(check(config))
    (tmp_path / "environment.py").write_text(GOOD)
    assert list(check(config)) == []


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ('{"prompt": "x", "task": {"a": 1}}', []),
        ('{"prompt": "x"}', ["expected rows with a column `task` in"]),
        (None, ["expected a virtual environment at"]),
    ],
)
def test_an_environment_of_another_package(tmp_path: Path, row: str | None, messages: list[str]) -> None:
    if row is not None:
        (tmp_path / "data.jsonl").write_text(row)
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").touch()
    config = run_config(tmp_path, reward=None, environment=EnvironmentConfig(verifiers="guess", venv=tmp_path))
    data = config.data.model_copy(update={"train": tmp_path / "data.jsonl"})
    found = [str(error) for error in check(config.model_copy(update={"data": data}))]
    assert len(found) == len(messages)
    assert all(error.startswith(message) for error, message in zip(found, messages, strict=True))


def named(folder: Path, tools: list[str], *allowed: list[str] | None) -> RunConfig:
    """A run whose sources may use these of the tools; the last one is held-out data."""
    sources = tuple(WeightedSource(path=folder / f"{place}.jsonl", tools=each) for place, each in enumerate(allowed))
    data = DataConfig(train=sources[:-1], eval=sources[-1:], max_prompt_tokens=32)
    return run_config(folder, environment=EnvironmentConfig.model_validate({"tools": tools}), data=data)


def test_sources_choose_among_the_tools_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def search(): ...\ndef _hidden(): ...\n")
    tools = ["python", "calculator", str(tmp_path / "more.py")]
    assert not list(check(named(tmp_path, tools, ["python", "search"], [], None)))
    (error,) = check(named(tmp_path, tools, None, ["_hidden"]))
    assert isinstance(error, ConfigError) and error.found == "_hidden"
    assert "python, calculator, search" in error.expected and "1.jsonl" in error.expected
    assert list(check(named(tmp_path, ["python"], ["calculator"], ["search"])))[1:], "held-out data, too"


def test_tools_of_a_source_need_tools_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set environment: \{tools: \[python\]\}"):
        RunConfig.model_validate(named(tmp_path, ["python"], ["python"], []).model_dump() | {"environment": None})
