"""The APIs of a session address: each one is a module that translates its requests and replies.

Invariant: an API is a pure translation to a `TurnRequest` and from an `AgentTurn`. It knows no session.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from polyreme.dataset.chat import Message
from polyreme_environment.agents.apis import chat, completions, inference, messages, responses
from polyreme_environment.agents.reply import AgentTurn, Event, EventWriter
from polyreme_environment.agents.request import Asked, TurnRequest


class Api(Protocol):
    """An API."""

    def read(self, asked: Asked, history: Callable[[str], list[Message]], /) -> TurnRequest:
        """The request. `history`: the conversation up to an answer, by the id of its turn. Raises RefusedRequestError."""

    def reply(self, asked: Asked, turn: AgentTurn, /) -> dict[str, object]:
        """The whole reply."""

    def events(self, asked: Asked, /) -> EventWriter:
        """What writes the same as server-sent events."""

    def error(self, status: int, message: str, code: str, /) -> Event: ...


APIS: Mapping[str, Api] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": inference,
}
"""By their paths."""
