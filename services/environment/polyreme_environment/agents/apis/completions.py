"""OpenAI's completions: a prompt as text or tokens, without a chat template. See `Api`."""

from collections.abc import Callable, Iterator

from polyreme.dataset.chat import Message
from polyreme_environment.agents.apis.chat import OUTPUT, error, token_names, wants_usage
from polyreme_environment.agents.reply import AgentTurn, Event, PartialTurn, usage
from polyreme_environment.agents.request import (
    SAMPLING,
    Asked,
    Keys,
    TurnRequest,
    bad,
    check_neutral,
    digest,
    read_bound,
    read_stop,
    read_temperature,
)

__all__ = ["error", "events", "read", "reply"]

_KEYS = Keys(
    frozenset(
        ["prompt", "max_tokens", "temperature", "stop", "stream", "logprobs", "return_token_ids", "return_tokens_as_token_ids"]
    ),
    {**SAMPLING, **OUTPUT, "echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},)},
)
_IDS = 1 << 31


def read(asked: Asked, history: Callable[[str], list[Message]]) -> TurnRequest:
    _KEYS.check(asked)
    if asked.get("logprobs") is not None:
        check_neutral(asked["logprobs"], "logprobs", (0,))
    return TurnRequest(
        digest("completions", asked),
        prompt=_prompt(asked.get("prompt")),
        max_tokens=read_bound(asked, "max_tokens"),
        temperature=read_temperature(asked),
        stop=read_stop(asked, "stop"),
        wants_tokens=asked.get("logprobs") is not None or bool(asked.get("return_token_ids")),
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    return {**_head(asked, turn), "choices": [_choice(asked, turn)], "usage": usage(turn)}


class CompletionEvents:
    """Chunks of the text. Tokens come with the last one."""

    is_named = False

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def begin(self, turn: PartialTurn | AgentTurn) -> Iterator[Event]:
        return iter(())

    def more(self, turn: PartialTurn | AgentTurn, thought: str, text: str) -> Iterator[Event]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        yield {**_head(self._asked, turn), "choices": [choice]}

    def end(self, turn: AgentTurn) -> Iterator[Event]:
        yield {**_head(self._asked, turn), "choices": [{**_choice(self._asked, turn), "text": ""}]}
        if wants_usage(self._asked):
            yield {**_head(self._asked, turn), "choices": [], "usage": usage(turn)}


events = CompletionEvents


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    return read_ids(value, "prompt")


def read_ids(value: object, key: str) -> tuple[int, ...]:
    """The ids of tokens, at least one. Raises RefusedRequestError."""
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < _IDS for each in value):
        return tuple(value)
    raise bad(f"expected `{key}` to be one text or the ids of one; found {value!r:.100}. Send a request for each one.")


def _choice(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "text": turn.said.content, "logprobs": None}
    if asked.get("logprobs") is not None:
        choice["logprobs"] = _logprobs(asked, turn)
    if asked.get("return_token_ids") and turn.sampled is not None:
        choice |= {"token_ids": list(turn.sampled.ids), "prompt_token_ids": list(turn.sampled.context_ids)}
    return choice | {"finish_reason": "length" if turn.is_cut else "stop", "stop_reason": turn.stopped_by}


def _logprobs(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    offsets, at = [], 0
    for each in turn.logprobs():
        offsets.append(at)
        at += len(each["token"])
    numbers = [each["logprob"] for each in turn.logprobs()]
    return {"tokens": token_names(asked, turn), "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}


def _head(asked: Asked, turn: PartialTurn | AgentTurn) -> dict[str, object]:
    model = str(asked.get("model") or "")
    return {"id": f"cmpl-{turn.id}", "object": "text_completion", "created": turn.created, "model": model}
