"""Reading a module's source gives the same reward function signature as loading the module."""

import inspect
import types
from pathlib import Path

import pytest

from polyreme.config.python_source import find_source
from polyreme.errors import ConfigError
from polyreme_reward.checks import stand_in
from polyreme_reward.plugins.load import _function

CLEAR = [
    "def reward(response): ...",
    "def helper(a): ...\nasync def score(prompt, /, response, label=3, *rest, bonus, weight=1.0, **more): ...",
    "X = 3\nclass Y: ...\ndef _hidden(a): ...\ndef compute_score(solution_str, ground_truth): ...",
    "import os\nfrom math import sqrt\nif True:\n    def mine(response): ...\nelse:\n    def mine(response): ...",
    "try:\n    import nothing\nexcept ImportError:\n    def reward(response): ...",
]
UNCLEAR = [
    "reward = lambda response: 0.0",
    "from functools import cache\n@cache\ndef reward(response): ...",
    "class Judge:\n    def __call__(self, response): ...",
]
WRONG = ["", "def a(): ...\ndef b(): ...", "import math", "def _reward(response): ..."]


def loaded(code: str) -> types.ModuleType:
    module = types.ModuleType("plugin")
    exec(code, module.__dict__)
    return module


@pytest.mark.parametrize("code", CLEAR)
def test_a_function_is_found_with_its_parameters(code: str) -> None:
    function = stand_in(code, "the test", None)
    real = _function(loaded(code), None, "the test")
    assert function is not None and function.__name__ == real.__name__
    ours, theirs = inspect.signature(function).parameters, inspect.signature(real).parameters
    assert [(p.name, p.kind, p.default is p.empty) for p in ours.values()] == [
        (p.name, p.kind, p.default is p.empty) for p in theirs.values()
    ]
    assert stand_in(code, "the test", real.__name__) is not None


@pytest.mark.parametrize("code", UNCLEAR)
def test_parameters_that_only_running_could_tell_are_none(code: str) -> None:
    assert stand_in(code, "the test", None) is None


@pytest.mark.parametrize("code", WRONG)
def test_a_module_without_one_reward_function_is_refused_as_loading_it_is(code: str) -> None:
    with pytest.raises(ConfigError):
        stand_in(code, "the test", None)
    with pytest.raises(ConfigError):
        _function(loaded(code), None, "the test")


def test_a_named_function_may_come_from_anywhere() -> None:
    assert stand_in("from math import sqrt", "the test", "sqrt") is None
    assert stand_in("from math import *", "the test", "sqrt") is None
    with pytest.raises(ConfigError, match="a function cube"):
        stand_in("from math import sqrt", "the test", "cube")


@pytest.mark.parametrize("code", ["def reward(:", "\0", "  x = 1\n y = 2"])
def test_a_text_that_is_not_python(code: str) -> None:
    with pytest.raises(ConfigError, match="Python in the test"):
        stand_in(code, "the test", None)


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rewards_of_the_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "sums.py").write_text("def reward(response): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_source("rewards_of_the_test.sums") == package / "sums.py"
    assert find_source("math") is None
    for missing in ("rewards_of_the_test.nothing", "nothing_of_the_test", "rewards_of_the_test.sums.deeper"):
        with pytest.raises(ConfigError, match="importable module"):
            find_source(missing)
