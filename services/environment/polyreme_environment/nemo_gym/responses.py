"""Requests of NeMo Gym's agents, which use OpenAI's Responses format, as chat completions, and turns as their replies.

Invariant: what has no counterpart is left in the request, which is then refused by name. Pure.
"""

from collections.abc import Mapping
from typing import Any

from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import RefusedRequestError

_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_WITHOUT_EFFECT = frozenset(
    ["include", "previous_response_id", "prompt", "prompt_cache_retention", "reasoning", "text", "truncation", "background"]
)
"""Keys that name something that a session does in any case, or does not have."""
_ROLES = {"developer": "system"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat completion that a request asks for. Raises RefusedRequestError."""
    asked = {_RENAMED.get(key, key): value for key, value in body.items() if value is not None and key not in _WITHOUT_EFFECT}
    given, instructions = asked.pop("input", None), asked.pop("instructions", None)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise _bad(f"expected `input` to be a text or a list of items; found {given!r:.100}")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(messages, item)
    tools = [_tool(tool) for tool in asked.pop("tools", ())]
    return {**asked, "messages": messages, **({"tools": tools} if tools else {})}


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Adds an item: to the answer before it where it is a part of that."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return  # a thought, which is no part of what an answer is known by
    if kind == "message":
        role = item.get("role")
        messages.append({"role": _ROLES.get(str(role), role), "content": _text(item.get("content"))})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
    else:
        raise _bad(f"expected items of `input` to be messages, function calls and their outputs; found {kind!r:.100}")


def _text(content: Any) -> Any:
    """The text of a content, whose parts may stand in a list."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise _bad(f"expected content of text alone; found {content!r:.100}")
    return "".join(parts)  # type: ignore[arg-type]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _bad(f"expected tools of type function; found {tool!r:.100}")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None},
    }


def response(turn: AgentTurn, body: Mapping[str, Any]) -> dict[str, Any]:
    """The reply with a turn."""
    message, said = turn.message, turn.said
    output: list[dict[str, Any]] = []
    if said.thought:
        output.append({"id": f"rs_{turn.id}", "type": "reasoning", "summary": [{"type": "summary_text", "text": said.thought}]})
    if said.content or not said.calls:
        content = [{"type": "output_text", "text": said.content, "annotations": []}]
        output.append({"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "status": "completed", "content": content})
    for call in message.get("tool_calls", ()):
        output.append(
            {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]}
        )
    usage = {
        "input_tokens": turn.context_tokens,
        "output_tokens": turn.tokens,
        "total_tokens": turn.context_tokens + turn.tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "status": "incomplete" if turn.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if turn.is_cut else None,
        "model": body.get("model") or "policy",
        "output": output,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "usage": usage,
    }


def _bad(message: str) -> RefusedRequestError:
    return RefusedRequestError(400, message, "invalid_request")
