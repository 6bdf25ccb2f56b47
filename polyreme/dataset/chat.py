"""Chat rows as a chat template gets them.

Invariant: training, evaluation, stages, warm start, reward models, `/v1` and the checks of data give a template its messages and
tools only in the form that this module returns, so equal rows have equal tokens everywhere. Nothing of a message is dropped
except null fields, with which Arrow fills what a row does not have. Pure, except the trial of a template before its first use.

The form is the one that the templates of transformers expect: `content` is a text, '' where a message has only tool calls or a
thought; `arguments` of a tool call are a mapping; an absent field is absent.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cache
from typing import Any

from polyreme.dataset.columns import TokenIds
from polyreme.dataset.strict_json import from_text, messages_of
from polyreme.dataset.template_trial import try_template
from polyreme.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""ShareGPT's names of roles that differ from ours."""
_NO_TOOLS = "Fix the row, or set data.tools_key: null for a column that the template must not get."
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = re.compile("(?:input_)?(?:image|video|audio)s?(?:_urls?)?$")
_PLACEHOLDER = re.compile(r"<\|?(?:image|video|audio)[a-z_]*\|?>", re.IGNORECASE)
"""What stands in a text for a picture, film or sound of another column: LLaVA's and verl's `<image>`, Qwen's `<|image_pad|>`."""
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)


@dataclass(frozen=True)
class Chat:
    """A conversation, and the tools that its model may call; None: the template gets none."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None = None


PromptSource = str | TokenIds | Chat
"""A text, its tokens, or a conversation."""
Answer = str | Message
"""A text, or a message by the assistant with more than a text, such as tool calls."""


def read_prompt(value: object, what: str, tools: object = None) -> PromptSource:
    """A prompt: a text, a list of one text (PaddleNLP's `src`), or messages that end before the answer.

    Args:
        what: names the value in errors, such as "'prompt' in FILE:LINE".
        tools: the row's tools, as `read_tools` takes them. A text with tools becomes a conversation.

    Raises:
        DataError: the value is none of these.
    """
    if isinstance(value, TokenIds):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise DataError(f"a prompt in {what}", "an empty text", "Remove or fill the row.")
        found = read_tools(tools, what)
        return value if found is None else Chat(({"role": "user", "content": value},), found)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, Mapping) for each in value):
        raise DataError(f"a text or a list of chat messages {{role, content}} in {what}", f"{value!r:.80}", "Fix the row.")
    chat = read_chat(value, what, tools)
    if chat.messages[-1]["role"] == "assistant":
        raise DataError(f"messages that end before the answer in {what}", "a last message by the assistant", "Remove it.")
    if not any(message["content"] for message in chat.messages):
        raise DataError(f"a prompt in {what}", "messages without a text", "Remove or fill the row.")
    return chat


def read_chat(value: object, what: str, tools: object = None) -> Chat:
    """A conversation from a list of messages, {role, content} or ShareGPT's {from, value}, or its JSON text. Arguments and errors
    as `read_prompt`."""
    value = messages_of(value, what)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"a list of chat messages {{role, content}} in {what}", f"{value!r:.80}", "Fix the row.")
    messages = tuple(_message(each, f"message {place} of {what}") for place, each in enumerate(value, 1))
    return Chat(messages, read_tools(tools, what))


def read_answer(value: object, what: str) -> Answer:
    """An answer: text, a list of one text (PaddleNLP's `tgt`), a message by the assistant, or a list of one. Raises DataError."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and (message := _message(value, what))["role"] == "assistant":
        return message if message.keys() - {"role", "content"} else str(message["content"])
    raise DataError(f"a text, or one assistant message, in {what}", f"{value!r:.80}", "Fix the row.")


def with_tools(prompt: str | Chat, tools: Sequence[Message]) -> Chat:
    """A prompt as a conversation that has further tools, behind its own."""
    chat = Chat(({"role": "user", "content": prompt},)) if isinstance(prompt, str) else prompt
    return Chat(chat.messages, (*(chat.tools or ()), *tools))


def read_tools(value: Any, what: str) -> tuple[Message, ...] | None:
    """Tools: a list of {type, function: {name, ...}} or of functions alone, or its JSON text; null and an empty list: none.

    Raises:
        DataError: the value is none of these.
    """
    value = from_text(value, f"tools of {what}", _NO_TOOLS)
    if not value:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(f"a list of tools, or its JSON text, in {what}", f"{value!r:.80}", _NO_TOOLS)
    tools = []
    for place, each in enumerate(value, 1):
        tool = _without_nulls(from_text(each, f"tool {place} of {what}", _NO_TOOLS))
        tool = {"type": "function", "function": tool} if isinstance(tool, dict) and isinstance(tool.get("name"), str) else tool
        named = (
            isinstance(tool, dict) and isinstance(tool.get("function"), dict) and isinstance(tool["function"].get("name"), str)
        )
        if not named and not (isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function"):
            raise DataError(
                f"a tool {{type, function: {{name, description, parameters}}}} as tool {place} of {what}",
                f"{each!r:.80}",
                _NO_TOOLS,
            )
        tools.append(tool)
    return tuple(tools)


def plain_prompt(prompt: PromptSource) -> str:
    """A prompt as plain text: the text itself, or the last user message of a conversation; '' for tokens."""
    if isinstance(prompt, Chat):
        by_user = [message for message in prompt.messages if message["role"] == "user"]
        return str((by_user or prompt.messages)[-1]["content"])
    return prompt if isinstance(prompt, str) else ""


def render(tokenizer: Any, chats: Sequence[Chat], *, opened: bool, day: date | None) -> list[str]:
    """The text that the chat template of a Hugging Face tokenizer writes for each conversation. Nothing else calls a template.

    Args:
        opened: whether the text ends with the beginning of an answer.
        day: the day that the template shows; None: today.

    Raises:
        ConfigError: the template exceeds the limits of `template_trial`.
        DataError: the template refuses a conversation.
    """
    if len(chats) > 1 and any(chat.tools != chats[0].tools for chat in chats):
        return [text for chat in chats for text in render(tokenizer, [chat], opened=opened, day=day)]
    tools = [*chats[0].tools] if chats and chats[0].tools is not None else None
    template = tokenizer.get_chat_template(tools=tools)
    try_template(template, tokenizer.special_tokens_map)
    fitted = [list(for_template(chat, template).messages) for chat in chats]
    clock = {"strftime_now": clock_of(day)} if day is not None else {}
    try:
        return list(tokenizer.apply_chat_template(fitted, tools=tools, tokenize=False, add_generation_prompt=opened, **clock))
    except Exception as error:  # a template is a program: it may raise anything for messages that it does not expect
        raise DataError(
            "messages that the chat template accepts",
            f"{type(error).__name__}: {error}",
            "Change the messages, or the model's chat template.",
        ) from error


def for_template(chat: Chat, template: str) -> Chat:
    """The conversation for this template. A developer message is a system message for a template that knows no developer.

    Raises:
        DataError: a role is unknown here and in the template, or the template does not show tools.
    """
    literals, shows_tools = _reads(template)
    for place, message in enumerate(chat.messages, 1):
        if message["role"] not in ROLES and message["role"] not in literals:
            raise DataError(
                f"a role that the chat template knows ({', '.join(ROLES[:3])}, assistant, tool) in message {place}",
                repr(message["role"]),
                "Fix the row.",
            )
    if chat.tools is not None and not shows_tools:
        raise DataError(
            "a chat template that shows tools",
            f"{len(chat.tools)} tools, which this one leaves out",
            "Use a model whose template has tools, or set data.tools_key: null to leave them out.",
        )
    if "developer" in literals:
        return chat
    messages = tuple({**each, "role": "system"} if each["role"] == "developer" else each for each in chat.messages)
    return Chat(messages, chat.tools)


def shows_tools(template: str) -> bool:
    """Whether a chat template reads the variable `tools`."""
    return _reads(template)[1]


def clock_of(day: date) -> Callable[[str], str]:
    """The function `strftime_now` of chat templates on this day: it formats the day's first second."""
    return datetime.combine(day, time()).strftime


@cache
def _reads(template: str) -> tuple[frozenset[str], bool]:
    """The texts that a template's code compares with, and whether it reads `tools`."""
    code = " ".join(_CODE.findall(template))
    literals = frozenset(one or other for one, other in _LITERAL.findall(code))
    return literals, re.search(r"\btools\b", _LITERAL.sub("", code)) is not None


def _message(value: object, what: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{{role, content}} as {what}", f"{value!r:.80}", "Fix the row.")
    fields = {key: each for key, each in value.items() if each is not None}
    if "role" not in fields and "from" in fields:
        fields = _from_sharegpt(fields, what)
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"a role, such as user, of {what}", f"{dict(value)!r:.80}", "Fix the row.")
    if media := _media(fields):
        raise DataError(f"text only in {what}", f"{media}", "Remove it: the model gets text only.")
    message: Message = {"role": role, "content": _content(fields.get("content"), what)}
    message |= {key: _without_nulls(each) for key, each in fields.items() if key not in ("role", "content", "function_call")}
    calls = fields.get("tool_calls")
    if calls is None and fields.get("function_call") is not None:  # OpenAI's older form
        calls = [fields["function_call"]]
    message.pop("tool_calls", None)
    if calls := from_text(calls, f"tool_calls of {what}"):
        if not isinstance(calls, list | tuple):
            raise DataError(f"a list of tool calls in {what}", f"{calls!r:.80}", "Fix the row.")
        message["tool_calls"] = [_call(each, f"tool call {place} of {what}") for place, each in enumerate(calls, 1)]
    thought = fields.get("reasoning_content", fields.get("reasoning"))
    if thought is not None:  # templates read it by either name
        message |= {"reasoning_content": thought, "reasoning": fields.get("reasoning", thought)}
    if fields.get("content") is None and not calls and thought is None:
        raise DataError(
            f"a text as content of {what}", "null" if "content" in value else "no content", "Fill or remove the message."
        )
    return message


def _from_sharegpt(fields: Mapping[str, object], what: str) -> dict[str, object]:
    rest = {key: each for key, each in fields.items() if key not in ("from", "value")}
    told, role = fields.get("value"), fields["from"]
    if role == "function_call":
        return {**rest, "role": "assistant", "tool_calls": [from_text(told, what)]}
    return {**rest, "role": _SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": told}


def _content(value: object, what: str) -> str:
    """The text of a message: parts of text are joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise DataError(f"a text as content of {what}", f"{value!r:.80}", "Write it as a text.")
    texts = []
    for place, part in enumerate(value, 1):
        text = part
        if isinstance(part, Mapping):
            kind = part.get("type") or "text"
            text = part.get("text") if kind in _TEXT_PARTS and not _media(part) else None
        if not isinstance(text, str):
            kind = (_media(part) or part.get("type")) if isinstance(part, Mapping) else part
            raise DataError(
                f"parts of type text in {what}",
                f"part {place}, of type {kind!r:.40}",
                "Remove the part: the model gets text only.",
            )
        texts.append(text)
    return "".join(texts)


def check_text_only(row: Mapping[str, object], where: str) -> None:
    """Raises DataError for a row whose texts have a place for a picture, a film or a sound of another column."""
    if (media := _media(row)) and (found := _PLACEHOLDER.search(str({key: each for key, each in row.items() if key != media}))):
        raise DataError(
            f"text only in {where}",
            f"{found.group()} in a text, and a column {media!r}",
            "Remove the row: the model gets text only.",
        )


def _media(fields: Mapping[str, object]) -> str | None:
    """The first field with what a model of text does not get."""
    return next((key for key, value in fields.items() if value and _MEDIA.match(key)), None)


def _call(value: object, what: str) -> Message:
    call = from_text(value, what)
    call = {key: each for key, each in call.items() if each is not None} if isinstance(call, Mapping) else call
    if isinstance(call, dict) and isinstance(call.get("name"), str) and "function" not in call:
        bare = {key: call.pop(key) for key in ("name", "arguments", "parameters") if key in call}
        call = {**call, "type": "function", "function": bare}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{{type, function: {{name, arguments}}}} as {what}", f"{value!r:.80}", "Fix the row.")
    if function.get("arguments") is None and "parameters" in function:  # Llama's name
        function = {**{key: each for key, each in function.items() if key != "parameters"}, "arguments": function["parameters"]}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        given = from_text(arguments, f"arguments of {what}") if arguments else {}
    else:
        given = _without_nulls(arguments) if arguments is not None else {}
    if not isinstance(given, dict):
        raise DataError(f"a mapping, or its JSON text, as arguments of {what}", f"{arguments!r:.80}", "Fix the row.")
    named = {key: _without_nulls(each) for key, each in function.items() if each is not None}
    return {**call, "function": {**named, "arguments": given}}


def _without_nulls(value: Any) -> Any:
    """The value without the null fields of its mappings, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(each) for each in value]
    return value
