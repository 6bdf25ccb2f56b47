"""OpenAI's Responses: input items, function tools, and answers that a later request names. See `Api`.

An answer is up to three kinds of items: thought, message and calls. Items of an answer that come back are one message again.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, groupby

from polyreme.dataset.chat import Message
from polyreme_environment.agents.apis.chat import error
from polyreme_environment.agents.reply import AgentTurn, Event, PartialTurn, TokenLogprob, token_fields
from polyreme_environment.agents.request import (
    IGNORED,
    SAMPLING,
    TOKEN_FIELDS,
    Asked,
    Keys,
    TurnRequest,
    bad,
    check_neutral,
    digest,
    past_answer,
    read_bound,
    read_conversation,
    read_list,
    read_temperature,
)

__all__ = ["error", "events", "read", "reply"]

_KEYS = Keys(
    frozenset(
        [
            "input",
            "instructions",
            "tools",
            "max_output_tokens",
            "temperature",
            "stream",
            "previous_response_id",
            "include",
            "text",
            TOKEN_FIELDS,
        ]
    ),
    {**SAMPLING, "tool_choice": ("none", "auto"), "background": (False,)},
    IGNORED | {"reasoning", "truncation", "max_tool_calls"},
)
_LOGPROBS = "message.output_text.logprobs"
_PREFIX = "resp_"
_Item = Event


def read(asked: Asked, history: Callable[[str], list[Message]]) -> TurnRequest:
    _KEYS.check(asked)
    if isinstance(text := asked.get("text"), Mapping) and text.get("format") is not None:
        check_neutral(text["format"], "text.format", ({"type": "text"},))
    instructions = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    before = history(str(asked["previous_response_id"]).removeprefix(_PREFIX)) if asked.get("previous_response_id") else []
    messages = [*instructions, *before, *_messages(asked.get("input"))]
    chat = read_conversation(messages, [_tool(each) for each in read_list(asked.get("tools"), "tools")], "`input`")
    return TurnRequest(
        digest("responses", asked),
        list(chat.messages),
        list(chat.tools or ()),
        chat.tools is not None and asked.get("tool_choice") != "none",
        max_tokens=read_bound(asked, "max_output_tokens"),
        temperature=read_temperature(asked),
        wants_tokens=_wants_logprobs(asked) or bool(asked.get(TOKEN_FIELDS)),
        instructions=len(instructions),
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    return {
        **_response(asked, turn),
        "status": "incomplete" if turn.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
        "output": _items(asked, turn),
        "usage": {
            "input_tokens": turn.context_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.context_tokens + turn.tokens,
        },
    }


class ResponseEvents:
    """Output items, of which the calls come whole."""

    is_named = True

    def __init__(self, asked: Asked) -> None:
        self._asked, self._numbers = asked, count()
        self._begun = list[str]()  # the types of the items that have begun
        self._ended = 0

    def begin(self, turn: PartialTurn | AgentTurn) -> Iterator[Event]:
        blank: _Item = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": {**_response(self._asked, turn), **blank}})

    def more(self, turn: PartialTurn | AgentTurn, thought: str, text: str) -> Iterator[Event]:
        if thought:
            yield from self._text(_thought(turn), thought)
        if text and self._begun == ["reasoning"] and not self._ended:
            yield from self._end(_thought(turn))
        if text:
            yield from self._text(_message(turn, "in_progress", []), text)

    def end(self, turn: AgentTurn) -> Iterator[Event]:
        for item in _items(self._asked, turn)[self._ended :]:
            if item["type"] == "function_call":
                yield from self._begin({**item, "arguments": "", "status": "in_progress"})
                delta = {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
                yield self._event({**delta, **self._where(item)})
            elif item["type"] not in self._begun:
                yield from self._begin(item)
            yield from self._end(item)
        whole = reply(self._asked, turn)
        yield self._event({"type": f"response.{whole['status']}", "response": whole})

    def _text(self, item: _Item, text: str) -> Iterator[Event]:
        if self._begun[-1:] != [item["type"]]:
            yield from self._begin(item)
        kind = item["content"][0]["type"]
        logprobs: Event = {"logprobs": []} if kind == "output_text" else {}
        yield self._event({"type": f"response.{kind}.delta", **self._part(item), "delta": text, **logprobs})

    def _begin(self, item: _Item) -> Iterator[Event]:
        self._begun.append(item["type"])
        blank: _Item = {"content": [], "status": "in_progress"} if "content" in item else {}
        yield self._event({"type": "response.output_item.added", "output_index": self._ended, "item": {**item, **blank}})
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            yield self._event({"type": "response.content_part.added", **self._part(item), "part": part})

    def _end(self, item: _Item) -> Iterator[Event]:
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event({"type": "response.function_call_arguments.done", **self._where(item), **done})
        else:
            (part,) = item["content"]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            done = {**self._part(item), "text": part["text"], **logprobs}
            yield self._event({"type": f"response.{part['type']}.done", **done})
            yield self._event({"type": "response.content_part.done", **self._part(item), "part": part})
        yield self._event({"type": "response.output_item.done", "output_index": self._ended, "item": item})
        self._ended += 1

    def _where(self, item: _Item) -> Event:
        return {"item_id": item["id"], "output_index": self._ended}

    def _part(self, item: _Item) -> Event:
        return {**self._where(item), "content_index": 0}

    def _event(self, event: Event) -> Event:
        return {**event, "sequence_number": next(self._numbers)}


events = ResponseEvents


def _response(asked: Asked, turn: PartialTurn | AgentTurn) -> dict[str, object]:
    same = {key: asked.get(key) for key in ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")}
    return {
        "id": f"{_PREFIX}{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "model": str(asked.get("model") or ""),
        "error": None,
        "metadata": asked.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "text": asked.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        **same,
    }


def _items(asked: Asked, turn: AgentTurn) -> list[_Item]:
    """The output. The fields of tokens are those of the whole turn, so one item has them: the last one."""
    said, items = turn.said, list[_Item]()
    if said.thought:
        items.append(_thought(turn))
    if said.content or not said.calls:
        logprobs = turn.logprobs() if _wants_logprobs(asked) else []
        items.append(_message(turn, "incomplete" if turn.is_cut else "completed", logprobs))
    for id, call in turn.calls:
        called = {"call_id": id, "name": call.name, "arguments": call.text}
        items.append({"type": "function_call", "id": f"fc_{id}", **called, "status": "completed"})
    if asked.get(TOKEN_FIELDS):
        items[-1] |= token_fields(turn)
    return items


def _thought(turn: PartialTurn | AgentTurn) -> _Item:
    content = [{"type": "reasoning_text", "text": turn.said.thought}]
    return {"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content, "status": "completed"}


def _message(turn: PartialTurn | AgentTurn, status: str, logprobs: list[TokenLogprob]) -> _Item:
    part = {"type": "output_text", "text": turn.said.content, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "content": [part], "status": status}


def _wants_logprobs(asked: Asked) -> bool:
    include = asked.get("include")
    return isinstance(include, list) and _LOGPROBS in include


def _messages(items: object) -> list[Message]:
    """The messages of the input. Successive items of an answer are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    groups = [(by_policy, list(group)) for by_policy, group in groupby(read_list(items, "input"), _is_answer)]
    return [each for by_policy, group in groups for each in ([_answer(group)] if by_policy else map(_input, group))]


def _kind(item: Mapping[str, object]) -> object:
    return item.get("type") or "message"


def _is_answer(item: Mapping[str, object]) -> bool:
    return _kind(item) in ("reasoning", "function_call") or (_kind(item) == "message" and item.get("role") == "assistant")


def _input(item: Mapping[str, object]) -> Message:
    match _kind(item):
        case "message":
            return {"role": item.get("role"), "content": item.get("content")}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case kind:
            kinds = "message, reasoning, function_call or function_call_output"
            raise bad(f"expected items of type {kinds} in `input`; found {kind!r:.100}. Remove it.")


def _answer(items: list[Mapping[str, object]]) -> Message:
    parts: list[object] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for item in items:
        if _kind(item) == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif _kind(item) == "reasoning":
            told = read_list(item.get("content") or item.get("summary"), "content")
            thoughts += [str(each.get("text") or "") for each in told]
        else:
            content = item.get("content")
            parts += content if isinstance(content, list) else [] if content is None else [content]
    return past_answer(parts, calls, "".join(thoughts))


def _tool(tool: Mapping[str, object]) -> Message:
    if tool.get("type") != "function":
        raise bad(f"expected tools of type function; found {tool.get('type')!r:.100}. The run has no other tools: remove it.")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
