"""The sessions of a server: each one is an agent's way to the policy in one episode.

Invariant: a session answers only to its own key, and only while its episode is played. Its requests become turns one after the other. A
repeated request gets the answer of the first one. What an agent can make a session keep is bounded.
"""

import asyncio
import hmac
import math
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from polyreme.api.v1.environment_pb2 import Answer
from polyreme_environment.agents.conversation import AgentConversation
from polyreme_environment.agents.message import Spoken, before_stop, spoken
from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import Message, RefusedRequestError, TurnRequest, bad
from polyreme_environment.contract import ToolCall
from polyreme_environment.tool_calls import ParsedCall

_WAITING = 64
"""Maximum number of requests of a session that wait for their turn."""


@dataclass(frozen=True)
class Asked:
    """A request, the turn that it follows (0: none) with the messages or the text behind that, and the calls of that turn that they answer."""

    request: TurnRequest
    after: int
    messages: list[Message]
    text: str | None
    calls: list[ToolCall]


class AgentSession:
    """The policy in one episode, as an agent asks for it and as the episode's stream gives it.

    Attributes:
        id: its part of the address.
        key: what its requests must present.
        over: why no turn follows any more; "": turns may follow.
    """

    def __init__(self, limit: int, tool_parser: str) -> None:
        """Args: limit: characters that a request may add. tool_parser: see `find_calls`."""
        self.id, self.key, self.over = secrets.token_hex(8), secrets.token_hex(24), ""
        self._limit, self._tool_parser = limit, tool_parser
        self._conversation = AgentConversation()
        self._answers: dict[bytes, asyncio.Future[AgentTurn]] = {}
        self._waiting: deque[TurnRequest] = deque()
        self._came = asyncio.Event()
        self._turns = 0
        self._calls: dict[str, ParsedCall] = {}  # of the last turn, by id
        self._reward: float | None = None
        self.is_rewarded = False

    async def answer(self, request: TurnRequest) -> AgentTurn:
        """The turn that answers a request. A caller that is cancelled leaves the request to its end. Raises RefusedRequestError."""
        known = self._answers.get(request.digest)
        if known is None:
            if self.over:
                raise RefusedRequestError(400, self.over, "episode_over")
            if len(self._waiting) >= _WAITING:
                raise RefusedRequestError(
                    429, f"expected at most {_WAITING} requests of a session at once; found more", "too_many"
                )
            known = self._answers[request.digest] = asyncio.get_running_loop().create_future()
            known.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have left
            self._waiting.append(request)
            self._came.set()
        return await asyncio.shield(known)

    def reward(self, amount: float) -> None:
        """Adds to the reward of the last turn. Raises RefusedRequestError."""
        if not math.isfinite(amount):
            raise RefusedRequestError(400, f"expected a finite reward; found {amount}", "invalid_request")
        if not self._turns:
            raise RefusedRequestError(400, "expected a turn before its reward; found none", "invalid_request")
        self._reward = (self._reward or 0.0) + amount
        self.is_rewarded = True

    def take_reward(self) -> float:
        """The rewards since the last call."""
        reward, self._reward = self._reward or 0.0, None
        return reward

    async def next(self) -> Asked:
        """The oldest request without an answer, which stays so until `sampled` or `refused`."""
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            asked = self._placed(self._waiting[0])
            if (chars := sum(len(message["content"]) for message in asked.messages) + len(asked.text or "")) <= self._limit:
                return asked
            found = f"expected at most environment.max_message_chars = {self._limit} new characters in a request; found {chars}"
            self.refused(found)

    def _placed(self, request: TurnRequest) -> Asked:
        if isinstance(request.prompt, str):
            after, text = self._conversation.place_text(request.prompt)
            return Asked(request, after, [], text, [])
        if request.prompt is not None:
            return Asked(request, 0, [], None, [])
        after, messages = self._conversation.place(request.messages, request.tools)
        return Asked(request, after, messages, None, self._made(messages) if after == self._turns else [])

    def history(self, turn: str) -> list[Message]:
        """The conversation up to the answer of a turn, by its id. Raises RefusedRequestError."""
        session, _, number = turn.rpartition("-")
        found = (
            self._conversation.history(int(number)) if session == self.id and number.isdecimal() and len(number) < 10 else None
        )
        if found is None:
            raise bad(f"expected the id of an earlier answer of this session; found {turn!r:.100}", "not_found")
        return found

    def sampled(self, answer: Answer) -> None:
        """Answers the oldest request."""
        request = self._waiting.popleft()
        text, stopped_by = before_stop(answer.text, request.stop)
        raw, _ = before_stop(answer.raw or answer.text, request.stop)
        is_prompt = request.prompt is not None
        said = Spoken(text) if is_prompt else spoken(text, raw, self._tool_parser if request.calls else None)
        counts = answer.is_cut, answer.context_tokens, answer.tokens
        tokens = answer.sampled if request.wants_tokens else None
        turn = AgentTurn(f"{self.id}-{self._turns + 1}", int(time.time()), said, *counts, stopped_by, tokens)
        self._calls = dict(turn.calls)
        if is_prompt:
            self._turns = self._conversation.add_text(request.prompt + answer.text if isinstance(request.prompt, str) else None)
        else:
            message = {**turn.message, "content": said.content}
            self._turns = self._conversation.add(request.messages, message, request.tools, instructions=request.instructions)
        self._answers[request.digest].set_result(turn)

    def _made(self, messages: list[Message]) -> list[ToolCall]:
        """The calls of the last turn whose results are in these messages."""
        found = [(self._calls.get(message.get("tool_call_id", "")), message["content"]) for message in messages]
        return [(call.name, call.text, result, 0.0, "") for call, result in found if call is not None]

    def refused(self, message: str, *, over: bool = False) -> None:
        """Refuses the oldest request; with `over`, also all others."""
        self._refuse(RefusedRequestError(400, message, "episode_over" if over else "invalid_request"))
        if over:
            self.end(message)

    def end(self, why: str) -> None:
        """Refuses the requests that wait and all further ones. Answers that were given are replayed."""
        self.over = self.over or why
        while self._waiting:
            self._refuse(RefusedRequestError(400, self.over, "episode_over"))

    def _refuse(self, error: RefusedRequestError) -> None:
        self._answers.pop(self._waiting.popleft().digest).set_exception(error)


class SessionTable:
    """The open sessions of a server."""

    def __init__(self) -> None:
        self._open: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def opened(self, limit: int, tool_parser: str) -> Iterator[AgentSession]:
        """A session that is open until the end of the block. Arguments as of `AgentSession`."""
        session = AgentSession(limit, tool_parser)
        self._open[session.id] = self._by_key[session.key] = session
        try:
            yield session
        finally:
            session.end("the episode of this session has ended")
            del self._open[session.id], self._by_key[session.key]

    def find(self, key: str, id: str | None) -> AgentSession:
        """The session of a key, and of an address if it names one. Raises RefusedRequestError."""
        session = self._by_key.get(key)
        if session is None or (id is not None and not hmac.compare_digest(session.id.encode(), id.encode())):
            found = "expected the api key of an open session" + ("" if id is None else ", that of this address")
            raise RefusedRequestError(401, f"{found}; found another one, or the episode has ended", "invalid_api_key")
        return session
