"""Requests for chat completions to a session address.

Invariant: a request that is accepted asks for what the run samples in any case: one message from the policy's whole distribution. Everything
that would change the distribution is refused, and so is every key that is not known. Pure.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.dataset.chat import Chat, read_chat
from polyreme.errors import DataError

Message = dict[str, Any]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
"""Keys that change what is sampled or answered, each with the values that do not. null is always allowed."""
_IGNORED = frozenset(
    [
        "model",
        "seed",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "reasoning_effort",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
    ]
)
"""Keys that have no effect here. The run's seeds determine the tokens, and its newest policy answers, whatever `model` says."""
_READ = frozenset(["messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "stream", "stream_options"])
_DO = "The run samples from the policy's whole distribution, which is what it trains. Remove it."
_SHOWN = 100


class RefusedRequestError(Exception):
    """An error in a client's request: the status, the message and the code of the reply."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation.

    Attributes:
        messages: at least one, in the form of `read_chat`; the last one is not an answer.
        tools: what the policy may call, in the form of `read_tools`.
        calls: whether calls are read from the answer.
        max_tokens: upper bound of the answer, or None.
        temperature: the sampling temperature that the run must have, or None.
        model: shown in the reply.
        stream, usage: whether the reply is a stream, and whether that ends with the numbers of tokens.
        digest: equal for requests for the same answer.
    """

    messages: list[Message]
    tools: list[Message]
    calls: bool
    max_tokens: int | None
    temperature: float | None
    model: str
    stream: bool
    usage: bool
    digest: bytes


def parse(body: bytes) -> ChatRequest:
    """Reads a request. Raises RefusedRequestError."""
    asked = read_object(body)
    for key, value in asked.items():
        allowed = _NEUTRAL.get(key)
        if value is None or key in _READ or key in _IGNORED or (allowed is not None and _is_one_of(value, allowed)):
            continue
        if allowed is None:
            raise _bad(f"expected no key `{key:.{_SHOWN}}` in a request of a training session. {_DO}")
        values = " or ".join(json.dumps(each) for each in allowed)
        raise _bad(f"expected `{key}` to be {values} in a training session; found {value!r:.{_SHOWN}}. {_DO}")
    chat = _chat(asked.get("messages"), asked.get("tools"))
    bounds = [_positive(asked[key], key) for key in ("max_tokens", "max_completion_tokens") if asked.get(key) is not None]
    temperature = asked.get("temperature")
    if temperature is not None and not _is_number(temperature):
        raise _bad(f"expected `temperature` to be a number; found {temperature!r:.{_SHOWN}}. Fix the request.")
    options = asked.get("stream_options")
    told = {key: value for key, value in asked.items() if key not in ("stream", "stream_options") and value is not None}
    return ChatRequest(
        list(chat.messages),
        list(chat.tools or ()),
        chat.tools is not None and asked.get("tool_choice") != "none",
        min(bounds, default=None),
        None if temperature is None else float(temperature),
        str(asked.get("model") or ""),
        bool(asked.get("stream")),
        isinstance(options, Mapping) and bool(options.get("include_usage")),
        hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest(),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises RefusedRequestError."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _bad(f"expected a JSON object; found {error}. Fix the request's body.") from None
    if not isinstance(asked, dict):
        raise _bad(f"expected a JSON object; found a {type(asked).__name__}. Fix the request's body.")
    return asked


def _chat(messages: Any, tools: Any) -> Chat:
    try:
        chat = read_chat(messages, "`messages`", tools)
        json.dumps([chat.messages, chat.tools], ensure_ascii=False).encode()
    except DataError as error:
        raise _bad(str(error)) from None
    except UnicodeEncodeError as error:
        raise _bad(f"expected valid Unicode in `messages` and `tools`; found {error}. Fix the request.") from None
    if chat.messages[-1]["role"] == "assistant":
        raise _bad("expected `messages` that end before the answer; found an answer at their end. Remove it.")
    return chat


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Whether a value equals an allowed one, where true and false are no numbers."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def _positive(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(f"expected `{key}` to be a number of tokens above 0; found {value!r:.{_SHOWN}}. Fix the request.")
    return min(value, (1 << 31) - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bad(message: str) -> RefusedRequestError:
    return RefusedRequestError(400, message, "invalid_request")
