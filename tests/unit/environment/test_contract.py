"""What an environment in a Python file may return."""

from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError, Moved, begun, choose, moved, tool_names, understood


class Env:
    def reset(self, row: dict[str, Any]) -> str:
        return ""

    def step(self, message: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class Other(Env): ...


def test_the_class_is_found_by_its_methods_or_its_name() -> None:
    assert choose({"Env": Env, "helper": len, "Row": dict}, None, "e.py") is Env
    assert choose({"Env": Env, "Other": Other}, "Other", "e.py") is Other
    for classes, name, found in (
        ({"Env": Env, "Other": Other}, None, "Env, Other"),
        ({"Row": dict}, None, "none"),
        ({"Env": Env}, "No", "Env"),
    ):
        with pytest.raises(ConfigError, match=f"found {found}"):
            choose(classes, name, "e.py")


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        (None, []),
        ("hello", [("user", "hello")]),
        ([{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}], [("tool", "4"), ("user", "so?")]),
    ],
)
def test_messages(answer: object, messages: list[tuple[str, str]]) -> None:
    assert begun(answer, 100) == messages
    assert moved((answer or "more", 1, False), 100).messages == (messages or [("user", "more")])


def test_a_step() -> None:
    assert moved((None, True, 1, {"tries": 3}), 9) == Moved([], 1.0, True, {"tries": 3.0})


class Tools:
    def reset(self, row: dict[str, Any]) -> None: ...

    def search(self) -> str:
        return self._search()

    def _search(self) -> str:
        return ""

    def close(self) -> None: ...


class More(Tools):
    def look(self) -> str:
        return ""


class Both(Env):
    tools = ("look",)

    def look(self) -> str:
        return ""

    def helps(self) -> str:
        return ""


def test_the_tools_of_a_class() -> None:
    assert [tool_names(kind) for kind in (Tools, More, Env, Both)] == [["search"], ["look", "search"], [], ["look"]]
    assert choose({"Tools": Tools}, None, "e.py") is Tools
    assert choose({"Tools": Tools, "Both": Both}, None, "e.py") is Both, "a class with `step` is preferred"
    assert choose({"Tools": Tools, "Both": Both}, "Tools", "e.py") is Tools


class Nasty:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"\(observation, reward, done\); found None"),
        (("x", 1.0), r"\(observation, reward, done\)"),
        (("x", "much", False), "a number as the reward"),
        (("x", "42", False), "a number as the reward"),
        (("x", b"42", False), "a number as the reward"),
        (("x", 0.0, True, {"a": "1"}), "a number as the a of step"),
        (("x", None, False), "a number as the reward"),
        (("x", float("nan"), False), "a finite reward"),
        (("x", 0.0, False, [1]), "a dict of numbers"),
        (("x", 0.0, False, {"a": "b"}), "a number as the a of step"),
        ((None, 0.0, False), "an observation from step"),
        ((Nasty(), 0.0, False), "found a Nasty"),
        (([{"role": "assistant", "content": "x"}], 0.0, False), "messages {role: user, system, tool"),
        (([{"role": "user", "content": 3}], 0.0, False), "content: text"),
        (([{"role": "user", "content": "x", "more": 1}], 0.0, False), "messages {role"),
        (("x" * 11, 0.0, False), "max_message_chars = 10 characters from step; found 11"),
        (("\ud800", 0.0, False), "valid Unicode"),
    ],
)
def test_anything_else_is_refused(answer: object, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        moved(answer, 10)


def reply(**changes: Any) -> dict[str, Any]:
    empty = {"messages": [], "reward": 0.0, "done": False, "parts": {}, "calls": [], "tools": []}
    return {**empty, **changes}


def test_a_workers_calls_are_read_within_the_limit() -> None:
    found = understood(reply(calls=[["f", "{}" * 9, "\ud800", -1, ""]], messages=[["tool", "x"]], tools=[{"type": "t"}]), 4)
    assert found == Moved([("tool", "x")], calls=[("f", "{}{}", "?", 0.0, "")], tools=[{"type": "t"}])


@pytest.mark.parametrize(
    "changes",
    [
        {"calls": [["f", "{}", "x", "soon", ""]]},
        {"parts": {"a": "b"}},
        {"parts": [1]},
        {"calls": [["f"]]},
        {"calls": [[1] * 5]},
        {"tools": [3]},
    ],
)
def test_what_no_worker_says_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ContractError, TypeError, ValueError)):
        understood(reply(**changes), 9)
