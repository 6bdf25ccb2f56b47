"""OpenAI's chat completions, with the fields by which vLLM's replies tell token ids. See `Api`."""

from collections.abc import Callable, Iterator

from polyreme.dataset.chat import Message
from polyreme_environment.agents.reply import AgentTurn, Event, PartialTurn, token_fields, usage
from polyreme_environment.agents.request import (
    IGNORED,
    SAMPLING,
    TOKEN_FIELDS,
    Asked,
    Keys,
    TurnRequest,
    bad,
    digest,
    read_bound,
    read_conversation,
    read_stop,
    read_temperature,
)

OUTPUT: dict[str, tuple[object, ...]] = {
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
            TOKEN_FIELDS,
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

_CHUNK = "chat.completion.chunk"


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
        wants_tokens=bool(asked.get("logprobs") or asked.get("return_token_ids") or asked.get(TOKEN_FIELDS)),
    )


def reply(asked: Asked, turn: AgentTurn) -> Event:
    choice = {
        "index": 0,
        "message": {**turn.message, "refusal": None, **_fields(asked, turn)},
        "logprobs": _logprobs(asked, turn),
        "finish_reason": _finish(turn),
        "stop_reason": turn.stopped_by,
    }
    return _with_ids(asked, turn, {**_head(asked, turn, "chat.completion"), "choices": [choice], "usage": usage(turn)})


class ChatEvents:
    """Chunks of the message. Calls come whole, and tokens with the last of them."""

    is_named = False

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def begin(self, turn: PartialTurn | AgentTurn) -> Iterator[Event]:
        yield self._chunk(turn, {"role": "assistant", "content": ""})

    def more(self, turn: PartialTurn | AgentTurn, thought: str, text: str) -> Iterator[Event]:
        if thought:
            yield self._chunk(turn, {"reasoning_content": thought})
        if text:
            yield self._chunk(turn, {"content": text})

    def end(self, turn: AgentTurn) -> Iterator[Event]:
        calls: list[Event] = [{"index": place, **call} for place, call in enumerate(turn.message.get("tool_calls", ()))]
        last = self._chunk(turn, {**({"tool_calls": calls} if calls else {}), **_fields(self._asked, turn)})
        (choice,) = last["choices"]
        choice |= {"logprobs": _logprobs(self._asked, turn), "finish_reason": _finish(turn), "stop_reason": turn.stopped_by}
        yield _with_ids(self._asked, turn, last)
        if wants_usage(self._asked):
            yield {**_head(self._asked, turn, _CHUNK), "choices": [], "usage": usage(turn)}

    def _chunk(self, turn: PartialTurn | AgentTurn, delta: Event) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**_head(self._asked, turn, _CHUNK), "choices": [choice]}


events = ChatEvents


def error(status: int, message: str, code: str) -> Event:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _fields(asked: Asked, turn: AgentTurn) -> Event:
    return token_fields(turn) if asked.get(TOKEN_FIELDS) else {}


def _with_ids(asked: Asked, turn: AgentTurn, whole: Event) -> Event:
    """A reply, or its last chunk, with the ids of its tokens if they were asked for."""
    if asked.get("return_token_ids") and turn.sampled is not None:
        whole["choices"][0]["token_ids"] = list(turn.sampled.ids)
        whole["prompt_token_ids"] = list(turn.sampled.context_ids)
    return whole


def wants_usage(asked: Asked) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    options = asked.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def token_names(asked: Asked, turn: AgentTurn) -> list[str]:
    """The tokens of a turn with `sampled`, by their texts or their ids."""
    assert turn.sampled is not None
    return [f"token_id:{id}" for id in turn.sampled.ids] if asked.get("return_tokens_as_token_ids") else list(turn.sampled.texts)


def _logprobs(asked: Asked, turn: AgentTurn) -> dict[str, object] | None:
    if not asked.get("logprobs"):
        return None
    pairs = zip(turn.logprobs(), token_names(asked, turn), strict=True)
    return {"content": [{**each, "token": name} for each, name in pairs], "refusal": None}


def _head(asked: Asked, turn: PartialTurn | AgentTurn, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": str(asked.get("model") or "")}


def _finish(turn: AgentTurn) -> str:
    return "length" if turn.is_cut else "tool_calls" if turn.said.calls else "stop"
