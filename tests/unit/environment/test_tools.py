"""Tools: their schemas against those of transformers, the calls in an answer, and how calls are answered."""

import inspect
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import get_json_schema

from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError
from polyreme_environment.tool_calls import PARSERS, Calls, Malformed, ParsedCall, find_calls
from polyreme_environment.tool_schema import tool_schema
from polyreme_environment.toolbox import Toolbox


class Desk:
    def reset(self, row: dict[str, Any]) -> None: ...

    def search(self, query: str, limit: int = 3, exact: bool | None = None) -> list[str]:
        """Searches the notes.

        Several words are joined
        by "and".

        Args:
            query: what to search for,
                in plain words
            limit: at most so many notes: the newest
            exact: whether case counts

        Returns:
            The notes.
        """
        return [query] * limit

    def write(self, notes: list[dict[str, float]], mode: Literal["new", "more"], where: int | str, extra: dict) -> None:  # type: ignore[type-arg]
        """Writes notes.

        Args:
            notes: the notes
            mode: how
            where: a place
            extra: anything
        """

    def now(self) -> str:
        """The time."""
        return "noon"

    async def fails(self, how: str) -> Any:
        """Fails.

        Args:
            how: in which way
        """
        if how.startswith("badly"):
            raise KeyError(how)
        return object()


@pytest.mark.parametrize("tool", [Desk.search, Desk.write, Desk.now, Desk.fails], ids=lambda tool: tool.__name__)
def test_a_schema_is_that_of_transformers(tool: Callable[..., Any]) -> None:
    oracle = get_json_schema(tool)
    oracle["function"].pop("return", None)
    oracle["function"]["parameters"] = {key: value for key, value in oracle["function"]["parameters"].items() if value != []}
    assert tool_schema(tool, tool.__name__, "e.py") == oracle


def untyped(self: Any, a) -> None:  # type: ignore[no-untyped-def]
    """Does.

    Args:
        a: one
    """


def undescribed(self: Any, a: int) -> None:
    """Does."""


def unknown_type(self: Any, a: bytes) -> None:
    """Does.

    Args:
        a: one
    """


def many(self: Any, *a: int) -> None:
    """Does.

    Args:
        a: some
    """


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda self: None, "a docstring"),
        (untyped, "a type for the argument a"),
        (undescribed, "a description of the argument a"),
        (unknown_type, "a type that JSON has"),
        (many, "arguments with names"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(tool: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool_schema(tool, "does", "e.py")


names = st.text(min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls_made = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=6), values, max_size=3)), max_size=3)


def safe(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    return "tool_call>" not in json.dumps(calls) and "think>" not in json.dumps(calls)


def hermes(calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}, indent=indent) for name, arguments in calls]
    return "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in objects)


@given(calls=calls_made.filter(safe), said=st.text("ab {}\n", max_size=9), indent=st.none() | st.just(1))
def test_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, Any]]], said: str, indent: int | None) -> None:
    thought = '<think>\n<tool_call>{"name": "no", "arguments": {}}</tool_call>\n</think>\n'
    whole = hermes(calls, indent)
    for text in (said + whole, thought + said + whole, (said + whole).removesuffix("\n</tool_call>")):
        assert [(call.name, call.arguments) for call in find_calls(text, "hermes") if isinstance(call, ParsedCall)] == calls
    llama = "; ".join(json.dumps({"name": name, "parameters": arguments}, indent=indent) for name, arguments in calls)
    found = find_calls(f"<|python_tag|>{llama}", "llama3_json")
    assert [(call.name, call.arguments) for call in found if isinstance(call, ParsedCall)] == calls


@given(text=st.text(max_size=30) | st.text('<tool_cal>/{}"name:gunts,1 ', max_size=60), parser=st.sampled_from(sorted(PARSERS)))
def test_any_text_has_calls_or_none(text: str, parser: str) -> None:
    for answer in (text, f"<tool_call>{text}</tool_call>", f"{{{text}"):
        for call in find_calls(answer, parser):
            assert json.loads(call.text) == call.arguments if isinstance(call, ParsedCall) else call.problem


@pytest.mark.parametrize(
    ("answer", "parser", "problem"),
    [
        ("<tool_call>\nmultiply(1, 2)\n</tool_call>", "hermes", "no JSON"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', "hermes", "no JSON"),
        ('<tool_call>{"name": "f", "arguments": "1"}</tool_call>', "hermes", "expected"),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "hermes", "expected"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "hermes", "NaN"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "hermes", "surrogate"),
        ('<tool_call>{"name": "f", "arguments": {"a": -1e999}}</tool_call>', "hermes", "1e999"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>", "hermes", "nesting"),
        ('{"name": "f", "parameters": {"a": 1e999}}', "llama3_json", "1e999"),
        ("<tool_call>" + "[" * 9999 + "</tool_call>", "hermes", "no JSON"),
        ('{"name": "f", "arguments": {}}', "llama3_json", "expected"),
        ('{"name": "f", "parameters": {}} and more', "llama3_json", "semicolon"),
    ],
)
def test_what_is_no_call_is_malformed(answer: str, parser: str, problem: str) -> None:
    (*_, last) = find_calls(answer, parser)
    assert isinstance(last, Malformed) and problem in last.problem


@pytest.mark.parametrize(
    ("answer", "parser"), [("12", "hermes"), ("<think>\n<tool_call>", "hermes"), ("so {}", "llama3_json"), ("", "llama3_json")]
)
def test_an_answer_without_calls(answer: str, parser: str) -> None:
    assert find_calls(answer, parser) == []


def test_an_answer_that_begins_in_a_thought_has_the_calls_behind_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert find_calls(f"I could use {call}", "hermes", in_thought=True) == []
    assert len(find_calls(f"I could use {call}</think>{call}", "hermes", in_thought=True)) == 1


async def make(method: Callable[[], Any]) -> Any:
    value = method()
    return await value if inspect.iscoroutine(value) else value


async def test_every_call_is_answered_in_order() -> None:
    box = Toolbox(Desk, "e.py")
    made: Calls = [
        ParsedCall("search", {"query": "a", "limit": 2}, "{}"),
        ParsedCall("now", {}, "{}"),
        ParsedCall("write", {"notes": [], "mode": "new", "where": 1, "extra": {}}, "{}"),
        ParsedCall("close", {}, "{}"),
        ParsedCall("search", {"limit": 2}, "{}"),
        ParsedCall("fails", {"how": "badly"}, "{}"),
        Malformed("no", "it is no JSON"),
    ]
    answers = await box.answer(Desk(), made, 7000, 1.0, make)
    assert [(name, result) for name, _, result, _, _ in answers] == [
        ("search", '["a", "a"]'),
        ("now", "noon"),
        ("write", "null"),
        ("close", "error: no tool is called 'close'; the tools are search, write, now, fails"),
        ("search", "error: missing a required argument: 'query'"),
        ("fails", "error: KeyError: 'badly'"),
        ("", "error: malformed call: it is no JSON"),
    ]
    assert [bool(error) for *_, error in answers] == [False] * 3 + [True] * 4
    assert all(seconds >= 0 for _, _, _, seconds, _ in answers)


async def test_results_are_bounded_and_must_be_text_or_json() -> None:
    box = Toolbox(Desk, "e.py")
    (answer,) = await box.answer(Desk(), [ParsedCall("search", {"query": "a" * 50, "limit": 1}, "{}")], 40, 1.0, make)
    assert answer[2] == '["' + "a" * 11 + " ... (cut at 40 characters)" and len(answer[2]) <= 40
    with pytest.raises(ContractError, match="fails to return a text or a value that JSON has"):
        await box.answer(Desk(), [ParsedCall("fails", {"how": "well"}, "{}")], 20, 1.0, make)


async def test_all_that_is_told_of_a_failed_call_is_bounded() -> None:
    long: dict[str, object] = {"how": "badly" * 1000}
    calls: Calls = [ParsedCall("fails", long, json.dumps(long)), ParsedCall("no" * 1000, {}, "{}")]
    answers = await Toolbox(Desk, "e.py").answer(Desk(), calls, 400, 1.0, make)
    for name, arguments, result, _, error in answers:
        assert max(map(len, (name, arguments))) <= 400 and max(map(len, (result, error))) <= 200
    assert answers[0][4].startswith("KeyError: 'badlybadly") and answers[0][2].startswith("error: KeyError: 'badlybadly")


@pytest.mark.parametrize("tools", [["gone"], ["step"], "now", [3]])
def test_tools_must_be_names_of_methods(tools: Any) -> None:
    kind = type("Wrong", (Desk,), {"tools": tools, "step": lambda self, message: None})
    with pytest.raises(ConfigError, match="names of methods as `tools` of Wrong"):
        Toolbox(kind, "e.py")
