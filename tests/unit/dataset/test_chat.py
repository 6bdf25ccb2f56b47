"""Messages, tools and answers in the form that chat templates get, and errors that name what is wrong."""

from typing import Any

import pytest

from polyreme.dataset.chat import Chat, for_template, plain_prompt, read_answer, read_chat, read_prompt, read_tools
from polyreme.dataset.columns import TokenIds
from polyreme.dataset.strict_json import messages_of
from polyreme.errors import DataError

USER = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([], r"\[\]"),
        ([USER, None], "message 2 of 'p' in f:1; found None"),
        ([USER, "text"], "message 2 of 'p' in f:1; found 'text'"),
        ([{}], "a role, such as user, of message 1 of 'p' in f:1"),
        ([{"content": "q"}], "a role, such as user, of message 1"),
        ([{"role": None, "content": "q"}], "a role, such as user, of message 1"),
        ([{"role": 3, "content": "q"}], "a role, such as user, of message 1"),
        ([{"role": "user"}], "content of message 1 of 'p' in f:1; found no content"),
        ([{"role": "user", "content": None}], "content of message 1 of 'p' in f:1; found null"),
        ([USER, {"role": "assistant", "content": None}, USER], "content of message 2 of 'p' in f:1; found null"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}, USER], "message 2 of 'p' in f:1; found null"),
        ([{"role": "user", "content": 5}], "a text as content of message 1 of 'p' in f:1; found 5"),
        ([{"role": "user", "content": {"type": "text", "text": "q"}}], "a text as content of message 1"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 1 of 'p' in f:1; found part 1, of type 'image_url'",
        ),
        ([{"role": "user", "content": ["a", {"type": "input_audio"}]}], "found part 2, of type 'input_audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "found part 1, of type 'text'"),
        ([{"role": "user", "content": [None]}], "found part 1, of type None"),
        ([{"role": "assistant", "content": "", "tool_calls": {"a": 1}}], "a list of tool calls in message 1"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}], "tool call 1 of message 1"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "JSON text as arguments of tool call 1 of message 1 of 'p' in f:1",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "a mapping, or its JSON text, as arguments of tool call 1",
        ),
        ([{"from": "function_call", "value": "f()"}], "JSON text as message 1"),
        *(
            ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}], complaint)
            for text, complaint in (
                ('{"a": NaN}', "NaN, which JSON does not have"),
                ('{"a": 1, "a": 2}', "the key 'a' twice"),
                ('{"a": "\\ud83d"}', "half of a surrogate pair"),
                ('{"a": ' + "[" * 201 + "]" * 201 + "}", "more than 200 levels"),
                ('{"a": ' + "9" * 4301 + "}", "Exceeds the limit"),
                ('{"a": 1} 2', "more after it: 2"),
            )
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "q", "image_url": {"url": "u"}}]}],
            "part 1, of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"image": "u", "text": "q"}]}], "part 1, of type 'image'"),
        ([{"role": "user", "content": "q", "images": ["u"]}], "text only in message 1 of 'p' in f:1; found images"),
    ],
)
def test_a_message_that_no_template_can_have_is_named(value: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        read_chat(value, "'p' in f:1")


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"text": "c"}]}, {"role": "user", "content": "abc"}),
        ({"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}]}, {"role": "user", "content": "a"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "", "weight": 0, "x": None}, {"role": "user", "content": "", "weight": 0}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({"from": "observation", "value": "r"}, {"role": "tool", "content": "r"}),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": null}'}}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": {"x": None, "y": 1}}}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"y": 1}}}]},
        ),
        (
            {"role": "assistant", "content": None, "reasoning": "t"},
            {"role": "assistant", "content": "", "reasoning": "t", "reasoning_content": "t"},
        ),
    ],
)
def test_a_message_has_the_fields_that_templates_read(message: Any, given: Any) -> None:
    before = repr(message)
    assert read_chat([message], "here").messages == (given,)
    assert repr(message) == before
    if "None" not in repr(given):  # a null that JSON text states is an argument
        assert read_chat([given], "here").messages == (given,)


@pytest.mark.parametrize("value", [None, [], "", "[]", "null"])
def test_no_tools(value: Any) -> None:
    assert read_tools(value, "here") is None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("{", "JSON text as tools of here"),
        ("x", "JSON text as tools of here"),
        ({"name": "f"}, "a list of tools"),
        ([None], "tool 1 of here; found None"),
        ([{"type": "function", "function": {}}], "tool 1 of here"),
        ([{"description": "d"}], "tool 1 of here"),
        (5, "a list of tools"),
    ],
)
def test_tools_that_no_template_can_show_are_named(value: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        read_tools(value, "here")


def test_a_prompt_is_a_text_or_ends_before_the_answer() -> None:
    ids = TokenIds((1, 2))
    assert read_prompt(ids, "here") is ids and plain_prompt(ids) == ""
    assert read_prompt(["q"], "here") == "q"
    assert read_prompt("q", "here", [{"name": "f"}]) == Chat((USER,), ({"type": "function", "function": {"name": "f"}},))
    assert (
        plain_prompt(read_prompt([USER, {"role": "assistant", "content": "a"}, {**USER, "content": [{"text": "r"}]}], "here"))
        == "r"
    )
    for value, found in (
        ("", "an empty text"),
        ([{**USER, "content": ""}], "messages without a text"),
        ([USER, {"role": "assistant", "content": "a"}], "a last message by the assistant"),
        (None, "None"),
        ({"role": "user"}, "role"),
        (["a", "b"], "a"),
    ):
        with pytest.raises(DataError, match="here") as caught:
            read_prompt(value, "here")
        assert found in caught.value.found


def test_an_answer_is_a_text_or_a_message_with_more() -> None:
    told = {"role": "assistant", "content": "a"}
    assert [read_answer(each, "here") for each in ("a", ["a"], told, [told], [{"from": "gpt", "value": "a"}])] == ["a"] * 5
    assert read_answer([{"role": "assistant", "content": None, "tool_calls": [CALL]}], "here") == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }
    for value in (None, 3, [], [told, told], USER, [USER]):
        with pytest.raises(DataError, match="in here"):
            read_answer(value, "here")


def test_only_the_code_of_a_template_names_roles_and_tools() -> None:
    chat = Chat(({"role": "critic", "content": "c"},))
    assert for_template(chat, "{% if m.role == 'critic' %}") == chat
    with pytest.raises(DataError, match="'critic'"):
        for_template(chat, "the 'critic' {{ m.content }}")
    tools = Chat((USER,), ({"type": "function", "function": {"name": "f"}},))
    assert for_template(tools, "{%- if tools %}") == tools
    for template in ("tools {{ m.content }}", "{{ 'tools' }}", "{{ my_tools }}"):
        with pytest.raises(DataError, match="shows tools"):
            for_template(tools, template)


def test_messages_may_be_a_json_text() -> None:
    text = ' [ {"role": "user", "content": "q"}]'
    assert read_chat(text, "here") == read_chat([USER], "here")
    assert messages_of('[{"from": "human", "value": "q"}]', "here") == [{"from": "human", "value": "q"}]
    for other in (
        "q",
        "[1]",
        '["q"]',
        '[{"role": "user"}]',
        '[{"a": 1}]',
        "[{",
        '{"role": "user", "content": "q"}',
        [USER],
        None,
    ):
        assert messages_of(other, "here") == other
    with pytest.raises(DataError, match="the key 'content' twice"):
        messages_of('[{"role": "user", "content": "q", "content": "r"}]', "here")


def test_a_call_may_name_its_arguments_parameters() -> None:
    given = {"function": {"name": "f", "arguments": {"a": 1}}}
    for call in ({"function": {"name": "f", "parameters": {"a": 1}}}, {"name": "f", "parameters": '{"a": 1}'}):
        message = read_chat([{"role": "assistant", "tool_calls": [call]}], "here").messages[0]
        assert message["tool_calls"][0]["function"] == given["function"]
