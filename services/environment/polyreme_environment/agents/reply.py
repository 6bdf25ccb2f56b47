"""A turn as the APIs of a session address tell it.

Invariant: the reply to a request depends only on the request and its turn, so a repeated request gets the same one. Pure.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyreme.api.v1.environment_pb2 import TurnTokens
from polyreme_environment.agents.message import Spoken
from polyreme_environment.tool_calls import ParsedCall


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
    def message(self) -> dict[str, Any]:
        """The message in the form of chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.said.content or (None if self.said.calls else "")}
        if self.said.thought:
            message["reasoning_content"] = self.said.thought
        if self.said.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.text}} for id, call in self.calls
            ]
        return message

    def logprobs(self) -> list[dict[str, Any]]:
        """Each token with its text, its log-probability and no other candidates. Only for a turn with `sampled`."""
        assert self.sampled is not None
        pairs = zip(self.sampled.texts, self.sampled.logprobs, strict=True)
        return [{"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []} for text, number in pairs]


def usage(turn: AgentTurn) -> dict[str, int]:
    """The numbers of tokens in the form of chat completions."""
    both = turn.context_tokens + turn.tokens
    return {"prompt_tokens": turn.context_tokens, "completion_tokens": turn.tokens, "total_tokens": both}


def server_sent(events: Iterator[dict[str, Any]], *, named: bool) -> bytes:
    """Events as the body of a reply. `named`: each with its `type` as its name; otherwise they end with [DONE]."""
    lines = [(f"event: {each['type']}\n" if named else "") + f"data: {json.dumps(each)}\n\n" for each in events]
    return "".join([*lines, *([] if named else ["data: [DONE]\n\n"])]).encode()
