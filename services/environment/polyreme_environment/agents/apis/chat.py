"""OpenAI's chat completions, with the fields by which vLLM's replies tell token ids. See `Api`."""

from collections.abc import Callable, Iterator
from typing import Any

from polyreme_environment.agents.reply import AgentTurn, server_sent, usage
from polyreme_environment.agents.request import (
    IGNORED,
    SAMPLING,
    Asked,
    Keys,
    Message,
    TurnRequest,
    bad,
    digest,
    read_bound,
    read_conversation,
    read_stop,
    read_temperature,
)

OUTPUT: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
"""vLLM's keys that change the text of an answer, with the values that do not."""
_KEYS = Keys(
    frozenset(
        [
            "messages",
            "tools",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "stop",
            "stream",
            "logprobs",
            "return_token_ids",
            "return_tokens_as_token_ids",
        ]
    ),
    {
        **SAMPLING,
        **OUTPUT,
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    },
    IGNORED | {"reasoning_effort", "verbosity", "prediction"},
)


def read(asked: Asked, history: Callable[[str], list[Message]]) -> TurnRequest:
    _KEYS.check(asked)
    chat = read_conversation(asked.get("messages"), asked.get("tools"), "`messages`")
    if not isinstance(asked.get("logprobs") or False, bool):
        raise bad(f"expected `logprobs` to be true or false; found {asked['logprobs']!r:.100}. Fix the request.")
    return TurnRequest(
        digest("chat", asked),
        list(chat.messages),
        list(chat.tools or ()),
        chat.tools is not None and asked.get("tool_choice") != "none",
        max_tokens=read_bound(asked, "max_tokens", "max_completion_tokens"),
        temperature=read_temperature(asked),
        stop=read_stop(asked, "stop"),
        wants_tokens=bool(asked.get("logprobs") or asked.get("return_token_ids")),
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {**turn.message, "refusal": None},
        "logprobs": _logprobs(asked, turn),
        "finish_reason": _finish(turn),
    }
    choice["stop_reason"] = turn.stopped_by
    whole = {**_head(asked, turn, "chat.completion"), "choices": [choice], "usage": usage(turn)}
    if asked.get("return_token_ids") and turn.sampled is not None:
        choice["token_ids"], whole["prompt_token_ids"] = list(turn.sampled.ids), list(turn.sampled.context_ids)
    return whole


def events(asked: Asked, turn: AgentTurn) -> bytes:
    return server_sent(_chunks(asked, turn), named=False)


def error(status: int, message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _chunks(asked: Asked, turn: AgentTurn) -> Iterator[dict[str, Any]]:
    """The message in one piece, the reason of its end, and the numbers of tokens where they were asked for."""
    head, ids = _head(asked, turn, "chat.completion.chunk"), bool(asked.get("return_token_ids")) and turn.sampled
    message = turn.message
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    first = {"index": 0, "delta": message, "logprobs": _logprobs(asked, turn), "finish_reason": None}
    if ids:
        yield {**head, "choices": [{**first, "token_ids": list(ids.ids)}], "prompt_token_ids": list(ids.context_ids)}
    else:
        yield {**head, "choices": [first]}
    yield {
        **head,
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(turn), "stop_reason": turn.stopped_by}],
    }
    if wants_usage(asked):
        yield {**head, "choices": [], "usage": usage(turn)}


def wants_usage(asked: Asked) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    options = asked.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def token_names(asked: Asked, turn: AgentTurn) -> list[str]:
    """The tokens of a turn with `sampled`, by their texts or their ids."""
    assert turn.sampled is not None
    return [f"token_id:{id}" for id in turn.sampled.ids] if asked.get("return_tokens_as_token_ids") else list(turn.sampled.texts)


def _logprobs(asked: Asked, turn: AgentTurn) -> dict[str, Any] | None:
    if not asked.get("logprobs"):
        return None
    pairs = zip(turn.logprobs(), token_names(asked, turn), strict=True)
    return {"content": [{**each, "token": name} for each, name in pairs], "refusal": None}


def _head(asked: Asked, turn: AgentTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": str(asked.get("model") or "")}


def _finish(turn: AgentTurn) -> str:
    return "length" if turn.is_cut else "tool_calls" if turn.said.calls else "stop"
