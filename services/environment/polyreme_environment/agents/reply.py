"""A turn as the APIs of a session address tell it.

Invariant: the reply to a request depends only on the request and its turn, so a repeated request gets the same one. Pure.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from polyreme.api.v1.environment_pb2 import TurnTokens
from polyreme.dataset.chat import Message
from polyreme_environment.agents.message import Spoken
from polyreme_environment.tool_calls import ParsedCall

Event = dict[str, Any]


class TokenLogprob(TypedDict):
    """A token in the form of chat completions. `bytes`: of its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[object]


@dataclass(frozen=True)
class PartialTurn:
    """What is certain of a turn that is being sampled. Attributes as of `AgentTurn`."""

    id: str
    created: int
    said: Spoken
    context_tokens: int


@dataclass(frozen=True)
class AgentTurn:
    """A turn of the policy as a client sees it.

    Attributes:
        id, created: unique, and its Unix time.
        is_cut: whether it ended at its maximum length.
        context_tokens, tokens: the number of tokens before it, and of it.
        stopped_by: the text of the request's `stop` that ended it, or None.
        sampled: its tokens, if the request asked for them.
    """

    id: str
    created: int
    said: Spoken
    is_cut: bool
    context_tokens: int
    tokens: int
    stopped_by: str | None = None
    sampled: TurnTokens | None = None

    @property
    def calls(self) -> list[tuple[str, ParsedCall]]:
        """The calls with their ids."""
        return [(f"call_{self.id}-{place}", call) for place, call in enumerate(self.said.calls)]

    @property
    def message(self) -> Message:
        """The message in the form of chat completions."""
        message: Message = {"role": "assistant", "content": self.said.content or (None if self.said.calls else "")}
        if self.said.thought:
            message["reasoning_content"] = self.said.thought
        if self.said.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.text}} for id, call in self.calls
            ]
        return message

    def logprobs(self) -> list[TokenLogprob]:
        """Each token with its text, its log-probability and no other candidates. Only for a turn with `sampled`."""
        assert self.sampled is not None
        pairs = zip(self.sampled.texts, self.sampled.logprobs, strict=True)
        return [{"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []} for text, number in pairs]


def usage(turn: AgentTurn) -> dict[str, int]:
    """The numbers of tokens in the form of chat completions."""
    both = turn.context_tokens + turn.tokens
    return {"prompt_tokens": turn.context_tokens, "completion_tokens": turn.tokens, "total_tokens": both}


def token_fields(turn: AgentTurn) -> dict[str, object]:
    """NeMo Gym's fields of a turn's tokens. Only for a turn with `sampled`."""
    assert turn.sampled is not None
    return {
        "prompt_token_ids": list(turn.sampled.context_ids),
        "generation_token_ids": list(turn.sampled.ids),
        "generation_log_probs": list(turn.sampled.logprobs),
    }


class EventWriter(Protocol):
    """The events of one streamed reply.

    Attributes:
        is_named: whether each event has its `type` as its name; otherwise the stream ends with [DONE].
    """

    is_named: bool

    def begin(self, turn: PartialTurn | AgentTurn) -> Iterator[Event]:
        """The first events. Neither thought nor text are told."""

    def more(self, turn: PartialTurn | AgentTurn, thought: str, text: str) -> Iterator[Event]:
        """What the thought and the text go on with. No thought follows a text."""

    def end(self, turn: AgentTurn) -> Iterator[Event]:
        """The last events, when all of the thought and the text have been told."""


async def server_sent(writer: EventWriter, parts: AsyncIterator[PartialTurn | AgentTurn]) -> AsyncIterator[bytes]:
    """The body of a streamed reply, as the parts of the turn come, of which the last one is whole."""
    told: Spoken | None = None
    async for turn in parts:
        events: list[Event] = []
        if told is None:
            told = Spoken("")
            events += writer.begin(turn)
        thought, text = _after(told.thought, turn.said.thought), _after(told.content, turn.said.content)
        if thought or text:
            events += writer.more(turn, thought, text)
        told = turn.said
        if isinstance(turn, AgentTurn):
            events += writer.end(turn)
        if events:
            yield encoded(events, is_named=writer.is_named)
    if not writer.is_named:
        yield b"data: [DONE]\n\n"


def encoded(events: Iterable[Event], *, is_named: bool) -> bytes:
    """Events as a part of a body."""
    return "".join((f"event: {each['type']}\n" if is_named else "") + f"data: {json.dumps(each)}\n\n" for each in events).encode()


def _after(told: str, text: str) -> str:
    if not text.startswith(told):
        raise AssertionError(f"told {told!r:.100}, but the text is {text!r:.100}")
    return text[len(told) :]
