"""OpenAI's Responses: input items, function tools, and answers that a later request names. See `Api`.

An answer is up to three kinds of items: the thought, the message and the calls. Items of an answer that come back are one message again.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, groupby
from typing import Any

from polyreme_environment.agents.apis.chat import error
from polyreme_environment.agents.reply import AgentTurn, server_sent
from polyreme_environment.agents.request import (
    IGNORED,
    SAMPLING,
    Asked,
    Keys,
    Message,
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
        ]
    ),
    {**SAMPLING, "tool_choice": ("none", "auto"), "background": (False,)},
    IGNORED | {"reasoning", "truncation", "max_tool_calls"},
)
_LOGPROBS = "message.output_text.logprobs"
_PREFIX = "resp_"
_Event = dict[str, Any]


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
        wants_tokens=_wants_logprobs(asked),
        instructions=len(instructions),
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, Any]:
    whole = {
        **_response(asked, turn),
        "status": "incomplete" if turn.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
        "output": list(_items(asked, turn)),
        "usage": {
            "input_tokens": turn.context_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.context_tokens + turn.tokens,
        },
    }
    return whole


def events(asked: Asked, turn: AgentTurn) -> bytes:
    numbers = count()
    return server_sent(({**each, "sequence_number": next(numbers)} for each in _events(asked, turn)), named=True)


def _events(asked: Asked, turn: AgentTurn) -> Iterator[_Event]:
    begun = {**_response(asked, turn), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(_items(asked, turn)):
        yield from _events_of(item, place)
    whole = reply(asked, turn)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _events_of(item: dict[str, Any], place: int) -> Iterator[_Event]:
    where = {"item_id": item["id"], "output_index": place}
    blank: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    yield {"type": "response.output_item.added", "output_index": place, "item": {**item, **blank, "status": "in_progress"}}
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": item["arguments"]}
    else:
        (part,), kind = item["content"], item["content"][0]["type"]
        more = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        where |= {"content_index": 0}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        yield {"type": f"response.{kind}.delta", **where, "delta": part["text"], **more}
        yield {"type": f"response.{kind}.done", **where, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _response(asked: Asked, turn: AgentTurn) -> dict[str, Any]:
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


def _items(asked: Asked, turn: AgentTurn) -> Iterator[dict[str, Any]]:
    said = turn.said
    if said.thought:
        content = [{"type": "reasoning_text", "text": said.thought}]
        yield {"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content, "status": "completed"}
    if said.content or not said.calls:
        logprobs = turn.logprobs() if _wants_logprobs(asked) else []
        part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if turn.is_cut else "completed"
        yield {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "content": [part], "status": status}
    for id, call in turn.calls:
        called = {"call_id": id, "name": call.name, "arguments": call.text}
        yield {"type": "function_call", "id": f"fc_{id}", **called, "status": "completed"}


def _wants_logprobs(asked: Asked) -> bool:
    include = asked.get("include")
    return isinstance(include, list) and _LOGPROBS in include


def _messages(items: Any) -> list[Message]:
    """The messages of the input. Successive items of an answer are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    groups = [(by_policy, list(group)) for by_policy, group in groupby(read_list(items, "input"), _is_answer)]
    return [each for by_policy, group in groups for each in ([_answer(group)] if by_policy else map(_message, group))]


def _kind(item: Mapping[str, Any]) -> Any:
    return item.get("type") or "message"


def _is_answer(item: Mapping[str, Any]) -> bool:
    return _kind(item) in ("reasoning", "function_call") or (_kind(item) == "message" and item.get("role") == "assistant")


def _message(item: Mapping[str, Any]) -> Message:
    match _kind(item):
        case "message":
            return {"role": item.get("role"), "content": item.get("content")}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case kind:
            kinds = "message, reasoning, function_call or function_call_output"
            raise bad(f"expected items of type {kinds} in `input`; found {kind!r:.100}. Remove it.")


def _answer(items: list[Mapping[str, Any]]) -> Message:
    parts, calls, thoughts = [], [], []
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


def _tool(tool: Mapping[str, Any]) -> Message:
    if tool.get("type") != "function":
        raise bad(f"expected tools of type function; found {tool.get('type')!r:.100}. The run has no other tools: remove it.")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
