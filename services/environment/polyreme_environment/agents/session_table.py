"""The open sessions of a server.

Invariant: a session answers only to its own key, and only while its episode is played.
"""

import hmac
from collections.abc import Iterator
from contextlib import contextmanager

from polyreme_environment.agents.request import RefusedRequestError
from polyreme_environment.agents.session import AgentSession, SessionLimits


class SessionTable:
    """The open sessions of a server."""

    def __init__(self) -> None:
        self._by_key: dict[str, AgentSession] = {}

    @contextmanager
    def opened(self, limits: SessionLimits) -> Iterator[AgentSession]:
        """A session that is open until the end of the block."""
        session = AgentSession(limits)
        self._by_key[session.key] = session
        try:
            yield session
        finally:
            session.end("the episode of this session has ended")
            del self._by_key[session.key]

    def find(self, key: str, id: str | None) -> AgentSession:
        """The session of a key, and of an address if it names one. Raises RefusedRequestError."""
        session = self._by_key.get(key)
        if session is None or (id is not None and not hmac.compare_digest(session.id.encode(), id.encode())):
            found = "expected the api key of an open session" + ("" if id is None else ", that of this address")
            raise RefusedRequestError(401, f"{found}; found another one, or the episode has ended", "invalid_api_key")
        return session
