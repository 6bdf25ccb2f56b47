"""Replies of a session address, in OpenAI's format.

Invariant: the reply to a request depends only on the request and its turn, so a repeated request gets the same one. Pure.
"""

import json
from dataclasses import dataclass
from typing import Any

from polyreme_environment.agents.message import Spoken
from polyreme_environment.agents.request import ChatRequest


@dataclass(frozen=True)
class AgentTurn:
    """A turn of the policy as a client sees it: a unique id, its Unix time, what it says, whether it was cut, and the tokens before it and of it."""

    id: str
    created: int
    said: Spoken
    is_cut: bool
    context_tokens: int
    tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The message as a client gets it, and sends it back."""
        said = self.said
        message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.calls else "")}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["tool_calls"] = [
                {"id": f"call_{self.id}-{place}", "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for place, call in enumerate(said.calls)
            ]
        return message


def completion(request: ChatRequest, turn: AgentTurn) -> dict[str, Any]:
    """A whole reply."""
    choice = {"index": 0, "message": {**turn.message, "refusal": None}, "logprobs": None, "finish_reason": _finish(turn)}
    return {**_head(request, turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def events(request: ChatRequest, turn: AgentTurn) -> bytes:
    """The same as server-sent events: the message in one piece, the reason of its end, and the numbers of tokens where they were asked for."""
    head = _head(request, turn, "chat.completion.chunk")
    message = turn.message
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    deltas: list[tuple[dict[str, Any], str | None]] = [(message, None), ({}, _finish(turn))]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]} for delta, finish in deltas
    ]
    if request.usage:
        chunks.append({**head, "choices": [], "usage": _usage(turn)})
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def error(message: str, code: str) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _head(request: ChatRequest, turn: AgentTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": request.model}


def _finish(turn: AgentTurn) -> str:
    return "length" if turn.is_cut else "tool_calls" if turn.said.calls else "stop"


def _usage(turn: AgentTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.context_tokens,
        "completion_tokens": turn.tokens,
        "total_tokens": turn.context_tokens + turn.tokens,
    }
