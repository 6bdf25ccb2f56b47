"""What every API of a session address asks for: the policy's next turn.

Invariant: a request that is accepted asks for what the run samples in any case: one answer from the policy's whole distribution.
Everything that would change the distribution is refused, and so is every key that is not known. Pure.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from polyreme.dataset.chat import Chat, Message, read_chat
from polyreme.dataset.strict_json import whole_value
from polyreme.errors import DataError
from polyreme_environment.agents.conversation import digests

Asked = Mapping[str, Any]
"""The JSON object of a request."""

SAMPLING: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
}
"""Keys of several APIs that change what is sampled or answered, each with the values that do not."""
IGNORED = frozenset(
    [
        "model",
        "seed",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
    ]
)
"""Keys of several APIs, unused here. The run's seeds decide the tokens, and its newest policy answers, whatever `model` says."""
TOKEN_FIELDS = "_token_fields"
"""Key that the address adds to a request whose reply has NeMo Gym's fields of tokens."""
_DO = "The run samples from the policy's whole distribution, which is what it trains. Remove it."
_SHOWN = 100
_STOPS = 64


class RefusedRequestError(Exception):
    """An error in a client's request: the status, the message and the code of the reply."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class TurnRequest:
    """A request for the policy's next turn.

    Attributes:
        digest: equal for requests for the same answer.
        messages: the conversation, in the form of `read_chat`, whose last message is not an answer. None for a prompt.
        tools: what the policy may call, in the form of `read_tools`.
        calls: whether calls are read from the answer.
        prompt: a text without a chat template, or its tokens, in place of messages.
        max_tokens: upper bound of the answer, or None.
        temperature: the sampling temperature that the run must have, or None.
        stop: texts that end the answer and are not part of it.
        stop_ids: tokens that end the answer, in addition to the run's.
        wants_tokens: whether the reply has tokens or their log-probabilities.
        streams: whether the reply comes as the turn is sampled.
        instructions: the number of first messages that are no part of the conversation, should a later request name the answer.
    """

    digest: bytes
    messages: list[Message] = field(default_factory=list)
    tools: list[Message] = field(default_factory=list)
    calls: bool = False
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    wants_tokens: bool = False
    instructions: int = 0
    streams: bool = False

    @cached_property
    def digests(self) -> list[bytes]:
        """See `conversation.digests`. (A long conversation costs the most here, so they are made once.)"""
        return digests(self.messages, self.tools)


@dataclass(frozen=True)
class Keys:
    """Keys of an API's requests: those that it reads, those that must have one of the values given, and those without effect."""

    read: frozenset[str]
    neutral: Mapping[str, tuple[object, ...]]
    ignored: frozenset[str] = IGNORED

    def check(self, asked: Asked) -> None:
        """Raises RefusedRequestError. null is always allowed."""
        for key, value in asked.items():
            if value is None or key in self.read or key in self.ignored:
                continue
            if key not in self.neutral:
                raise bad(f"expected no key `{key:.{_SHOWN}}` in a request of a training session. {_DO}")
            check_neutral(value, key, self.neutral[key])


def check_neutral(value: object, key: str, allowed: Sequence[object]) -> None:
    """Raises RefusedRequestError unless a value equals an allowed one, where true and false are no numbers."""
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
        values = " or ".join(json.dumps(each) for each in allowed)
        raise bad(f"expected `{key}` to be {values} in a training session; found {value!r:.{_SHOWN}}. {_DO}")


def read_object(body: bytes) -> dict[str, object]:
    """The JSON object in a body. Raises RefusedRequestError."""
    try:
        asked = whole_value(body.decode())
    except ValueError as error:
        raise bad(f"expected a JSON object; found {error}. Fix the request's body.") from None
    if not isinstance(asked, dict):
        raise bad(f"expected a JSON object; found a {type(asked).__name__}. Fix the request's body.")
    return asked


def digest(api: str, asked: Asked) -> bytes:
    """Of a request to an API. Whether the reply is a stream makes no difference.

    Raises RefusedRequestError for half a character, which an escape of JSON may stand for.
    """
    told = {key: value for key, value in asked.items() if key not in ("stream", "stream_options") and value is not None}
    try:
        text = json.dumps(told, ensure_ascii=False, sort_keys=True).encode()
    except UnicodeEncodeError:
        for key, value in told.items():
            check_unicode(value, f"`{key}`")
        raise
    return hashlib.sha256(api.encode() + text).digest()


def read_conversation(messages: object, tools: object, what: str) -> Chat:
    """The messages and tools of a request. `what` names the messages in errors. Raises RefusedRequestError."""
    try:
        chat = read_chat(messages, what, tools)
    except DataError as error:
        raise bad(str(error)) from None
    if chat.messages[-1]["role"] == "assistant":
        raise bad(f"expected {what} that end before the answer; found an answer at their end. Remove it.")
    return chat


def check_unicode(value: object, what: str) -> None:
    """Raises RefusedRequestError for half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad(f"expected valid Unicode in {what}; found {error}. Fix the request.") from None


def past_answer(content: list[object], calls: list[Message], thought: str) -> Message:
    """An answer that comes back, from the parts of its text, its calls and its thought."""
    more = {"tool_calls": calls, "reasoning_content": thought}
    return {"role": "assistant", "content": content, **{key: value for key, value in more.items() if value}}


def read_list(value: object, key: str) -> list[Mapping[str, object]]:
    """A list of objects; null: an empty one. Raises RefusedRequestError."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise bad(f"expected `{key}` to be a list of objects; found {value!r:.{_SHOWN}}. Fix the request.")
    return value


def read_bound(asked: Asked, *keys: str) -> int | None:
    """The least of the bounds of an answer's tokens. Raises RefusedRequestError."""
    return min((_positive(asked[key], key) for key in keys if asked.get(key) is not None), default=None)


def read_temperature(asked: Asked) -> float | None:
    """Raises RefusedRequestError."""
    value = asked.get("temperature")
    if value is None:
        return None
    if math.isnan(number := as_float(value)):
        raise bad(f"expected `temperature` to be a number; found {value!r:.{_SHOWN}}. Fix the request.")
    return number


def as_float(value: object) -> float:
    """A number of JSON; NaN for anything else, and for an integer that no float holds."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def read_stop(asked: Asked, key: str) -> tuple[str, ...]:
    """A text or a list of texts. Raises RefusedRequestError."""
    if not (value := asked.get(key)):
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _STOPS or not all(isinstance(each, str) and each for each in texts):
        raise bad(
            f"expected `{key}` to be at most {_STOPS} texts that are not empty; found {value!r:.{_SHOWN}}. Fix the request."
        )
    return tuple(texts)


def bad(message: str, code: str = "invalid_request") -> RefusedRequestError:
    """An error that the client can correct."""
    return RefusedRequestError(400, message, code)


def _positive(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad(f"expected `{key}` to be a number of tokens above 0; found {value!r:.{_SHOWN}}. Fix the request.")
    return min(value, (1 << 31) - 1)
