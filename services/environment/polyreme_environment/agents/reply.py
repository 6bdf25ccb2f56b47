"""Replies of a session address, in OpenAI's format.

Invariant: the reply to a request depends only on the request and its turn, so a repeated request gets the same one. Pure.
"""

import json
from dataclasses import dataclass
from typing import Any

from polyreme_environment.agents.request import ChatRequest


@dataclass(frozen=True)
class Turn:
    """A turn of the policy as a client sees it: a unique id, its Unix time, its text, whether it was cut, and the tokens before it and of it."""

    id: str
    created: int
    text: str
    is_cut: bool
    context_tokens: int
    tokens: int


def completion(request: ChatRequest, turn: Turn) -> dict[str, Any]:
    """A whole reply."""
    message = {"role": "assistant", "content": turn.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(turn)}
    return {**_head(request, turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def events(request: ChatRequest, turn: Turn) -> bytes:
    """The same as server-sent events: the role, the text, the reason of its end, and the numbers of tokens where they were asked for."""
    head = _head(request, turn, "chat.completion.chunk")
    deltas: list[tuple[dict[str, Any], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": turn.text}, None),
        ({}, _finish(turn)),
    ]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]} for delta, finish in deltas
    ]
    if request.usage:
        chunks.append({**head, "choices": [], "usage": _usage(turn)})
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def error(message: str, code: str) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _head(request: ChatRequest, turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": request.model}


def _finish(turn: Turn) -> str:
    return "length" if turn.is_cut else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.context_tokens,
        "completion_tokens": turn.tokens,
        "total_tokens": turn.context_tokens + turn.tokens,
    }
