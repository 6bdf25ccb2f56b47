"""Anthropic's messages: content blocks of texts, tool uses and their results. See `Api`."""

from collections.abc import Callable, Iterator, Mapping

from polyreme.dataset.chat import Message
from polyreme_environment.agents.reply import AgentTurn, Event, PartialTurn
from polyreme_environment.agents.request import (
    SAMPLING,
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
    read_stop,
    read_temperature,
)

_KEYS = Keys(
    frozenset(
        ["messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "stop_sequences", "stream", "thinking"]
    ),
    {**{key: SAMPLING[key] for key in ("top_p", "top_k")}, "mcp_servers": ([],)},
    frozenset(("model", "metadata", "service_tier", "cache_control", "inference_geo")),
)
_ERRORS = {401: "authentication_error", 429: "rate_limit_error"}
_Block = Event


def read(asked: Asked, history: Callable[[str], list[Message]]) -> TurnRequest:
    _KEYS.check(asked)
    choice = asked.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    check_neutral(kind, "tool_choice.type", ("none", "auto"))
    messages = [{"role": "system", "content": asked["system"]}] if asked.get("system") else []
    for message in read_list(asked.get("messages"), "messages"):
        messages += _assistant(message) if message.get("role") == "assistant" else _user(message)
    tools = [_tool(each) for each in read_list(asked.get("tools"), "tools")]
    chat = read_conversation(messages, tools, "`messages`")
    return TurnRequest(
        digest("messages", asked),
        list(chat.messages),
        list(chat.tools or ()),
        chat.tools is not None and kind != "none",
        max_tokens=read_bound(asked, "max_tokens"),
        temperature=read_temperature(asked),
        stop=read_stop(asked, "stop_sequences"),
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    return {**_head(asked, turn), "content": list(_blocks(asked, turn)), **_stop(turn), "usage": _usage(turn, turn.tokens)}


class MessageEvents:
    """Content blocks, of which the tool uses come whole."""

    is_named = True

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._blocks = list[str]()  # the types of the blocks that have begun
        self._is_open = False

    def begin(self, turn: PartialTurn | AgentTurn) -> Iterator[Event]:
        blank: _Block = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(turn, 0)}
        yield {"type": "message_start", "message": {**_head(self._asked, turn), **blank}}

    def more(self, turn: PartialTurn | AgentTurn, thought: str, text: str) -> Iterator[Event]:
        if thought and _wants_thought(self._asked):
            yield from self._text("thinking", thought, {"signature": ""})
        if text:
            yield from self._text("text", text, {"citations": None})

    def end(self, turn: AgentTurn) -> Iterator[Event]:
        if "text" not in self._blocks and not turn.said.calls:
            yield from self._begin({"type": "text", "text": "", "citations": None})
        for id, call in turn.calls:
            yield from self._begin({"type": "tool_use", "id": id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.text})
        yield from self._stop()
        yield {"type": "message_delta", "delta": _stop(turn), "usage": _usage(turn, turn.tokens)}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str, blank: _Block) -> Iterator[Event]:
        if self._blocks[-1:] != [kind]:
            yield from self._begin({"type": kind, kind: "", **blank})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: _Block) -> Iterator[Event]:
        yield from self._stop()
        self._blocks.append(block["type"])
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: _Block) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


events = MessageEvents


def error(status: int, message: str, code: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": message, "code": code}}


def _head(asked: Asked, turn: PartialTurn | AgentTurn) -> _Block:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": str(asked.get("model") or "")}


def _wants_thought(asked: Asked) -> bool:
    thinking = asked.get("thinking")
    return isinstance(thinking, Mapping) and thinking.get("type") != "disabled"


def _blocks(asked: Asked, turn: AgentTurn) -> Iterator[_Block]:
    """The content: the thought only where the request wants one, since other clients expect the text first."""
    if turn.said.thought and _wants_thought(asked):
        yield {"type": "thinking", "thinking": turn.said.thought, "signature": ""}
    if turn.said.content or not turn.said.calls:
        yield {"type": "text", "text": turn.said.content, "citations": None}
    for id, call in turn.calls:
        yield {"type": "tool_use", "id": id, "name": call.name, "input": call.arguments}


def _stop(turn: AgentTurn) -> dict[str, object]:
    reason = (
        "max_tokens" if turn.is_cut else "tool_use" if turn.said.calls else "stop_sequence" if turn.stopped_by else "end_turn"
    )
    return {"stop_reason": reason, "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None}


def _usage(turn: PartialTurn | AgentTurn, tokens: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": turn.context_tokens, "output_tokens": tokens, **cache}


def _assistant(message: Mapping[str, object]) -> list[Message]:
    """An answer that comes back."""
    parts: list[object] = []
    calls: list[Message] = []
    thought = ""
    for block in _content(message):
        match block.get("type"):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thought += str(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case _:
                parts.append(_text(block))
    return [past_answer(parts, calls, thought)]


def _user(message: Mapping[str, object]) -> list[Message]:
    """The messages of a user's message: one for each result of a tool, and for the texts between them."""
    found: list[Message] = []
    for block in _content(message):
        if block.get("type") == "tool_result":
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""})
        elif found and found[-1]["role"] != "tool":
            found[-1]["content"].append(_text(block))
        else:
            found.append({"role": message.get("role"), "content": [_text(block)]})
    return found


def _content(message: Mapping[str, object]) -> list[Mapping[str, object]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else read_list(content, "content")


def _text(block: Mapping[str, object]) -> _Block:
    """A block without what is not for the policy, like `cache_control`. One that is no text is refused with the conversation."""
    return {"type": block.get("type"), "text": block.get("text")}


def _tool(tool: Mapping[str, object]) -> Message:
    if tool.get("type") not in (None, "custom"):
        raise bad(
            f"expected tools with an `input_schema`; found type {tool.get('type')!r:.100}. The run has no other tools: remove it."
        )
    told = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": told}
