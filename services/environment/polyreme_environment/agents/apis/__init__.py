"""The APIs of a session address: each one is a module that translates its requests and replies.

Invariant: an API is a pure translation to a `TurnRequest` and from an `AgentTurn`. It knows no session.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polyreme_environment.agents.apis import chat, completions, messages, responses
from polyreme_environment.agents.reply import AgentTurn, EventWriter
from polyreme_environment.agents.request import Asked, Message, TurnRequest


class Api(Protocol):
    """An API."""

    def read(self, asked: Asked, history: Callable[[str], list[Message]], /) -> TurnRequest:
        """The request. `history`: the conversation up to an answer, by the id of its turn. Raises RefusedRequestError."""
        ...

    def reply(self, asked: Asked, turn: AgentTurn, /) -> dict[str, Any]:
        """The whole reply."""
        ...

    def events(self, asked: Asked, /) -> EventWriter:
        """What writes the same as server-sent events."""
        ...

    def error(self, status: int, message: str, code: str, /) -> dict[str, Any]: ...


APIS: Mapping[str, Api] = {
    "/chat/completions": chat,
    "/completions": completions,
    "/responses": responses,
    "/messages": messages,
}
"""By their paths."""
