"""The sessions of a server: each one is an agent's way to the policy in one episode.

Invariant: a session answers only to its own key, and only while its episode is played. A repeated request gets the answer of the first one,
which may still be sampled. What an agent can make a session keep is bounded.
"""

import asyncio
import hmac
import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from polyreme.api.v1.environment_pb2 import Answer
from polyreme_environment.agents.conversation import AgentConversation
from polyreme_environment.agents.message import Spoken, before_stop, spoken
from polyreme_environment.agents.reply import AgentTurn
from polyreme_environment.agents.request import Message, RefusedRequestError, TurnRequest, bad
from polyreme_environment.contract import ToolCall
from polyreme_environment.tool_calls import ParsedCall

_WAITING = 64
"""Maximum number of requests of a session that wait to be asked for."""


@dataclass(frozen=True)
class SessionLimits:
    """Of a session: characters that a request may add, turns that are sampled at the same time, and how calls are written: see `find_calls`."""

    chars: int
    at_once: int
    tool_parser: str


@dataclass(frozen=True)
class Asked:
    """A request and its number, the turn that it follows (0: none) with the messages or the text behind that, and the calls of that turn that
    they answer."""

    number: int
    request: TurnRequest
    after: int
    messages: list[Message]
    text: str | None
    calls: list[ToolCall]


@dataclass(eq=False)
class _Pending:
    """A request and its answer to be."""

    request: TurnRequest
    answer: "asyncio.Future[AgentTurn]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AgentSession:
    """The policy in one episode, as an agent asks for it and as the episode's stream gives it.

    Attributes:
        id: its part of the address.
        key: what its requests must present.
        over: why no turn begins any more; "": turns may begin.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.id, self.key, self.over = secrets.token_hex(8), secrets.token_hex(24), ""
        self._limits = limits
        self._conversation = AgentConversation()
        self._known: dict[bytes, _Pending] = {}  # by the requests' digests, answered or not
        self._waiting: deque[_Pending] = deque()
        self._sampling: dict[int, _Pending] = {}  # by the requests' numbers
        self._changed = asyncio.Event()
        self._newest = 0  # number of a request
        self._last = 0  # the turn that was answered last
        self._calls: dict[int, dict[str, ParsedCall]] = {}  # of each turn, by id
        self._rewards: defaultdict[int, float] = defaultdict(float)
        self.is_rewarded = False

    @property
    def sampling(self) -> int:
        """How many turns are being sampled."""
        return len(self._sampling)

    async def answer(self, request: TurnRequest) -> AgentTurn:
        """The turn that answers a request. A caller that is cancelled leaves the request to its end. Raises RefusedRequestError."""
        return await asyncio.shield(self._pending(request).answer)

    def _pending(self, request: TurnRequest) -> _Pending:
        if (known := self._known.get(request.digest)) is not None:
            return known
        if self.over:
            raise RefusedRequestError(400, self.over, "episode_over")
        if len(self._waiting) >= _WAITING:
            raise RefusedRequestError(429, f"expected at most {_WAITING} requests of a session that wait; found more", "too_many")
        pending = self._known[request.digest] = _Pending(request)
        pending.answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have left
        self._waiting.append(pending)
        self._changed.set()
        return pending

    def reward(self, amount: float) -> None:
        """Adds to the reward of the turn that was answered last. Raises RefusedRequestError."""
        if not math.isfinite(amount):
            raise RefusedRequestError(400, f"expected a finite reward; found {amount}", "invalid_request")
        if not self._last:
            raise RefusedRequestError(400, "expected a turn before its reward; found none", "invalid_request")
        self._rewards[self._last] += amount
        self.is_rewarded = True

    def take_rewards(self) -> dict[int, float]:
        """The rewards since the last call, by the numbers of their turns."""
        rewards, self._rewards = dict(self._rewards), defaultdict(float)
        return rewards

    async def next(self) -> Asked:
        """The oldest request that waits, when one more turn may be sampled. It is sampled until `sampled` or `refused`."""
        while True:
            while not self._waiting or len(self._sampling) >= self._limits.at_once:
                self._changed.clear()
                await self._changed.wait()
            self._newest += 1
            pending = self._sampling[self._newest] = self._waiting.popleft()
            asked = self._placed(self._newest, pending.request)
            chars = sum(len(message["content"]) for message in asked.messages) + len(asked.text or "")
            if chars <= (limit := self._limits.chars):
                return asked
            found = f"expected at most environment.max_message_chars = {limit} new characters in a request; found {chars}"
            self.refused(asked.number, found)

    def _placed(self, number: int, request: TurnRequest) -> Asked:
        if isinstance(request.prompt, str):
            after, text = self._conversation.place_text(request.prompt)
            return Asked(number, request, after, [], text, [])
        if request.prompt is not None:
            return Asked(number, request, 0, [], None, [])
        after, messages = self._conversation.place(request.messages, request.tools)
        return Asked(number, request, after, messages, None, self._made(after, messages))

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
        """Answers a request, by its number."""
        if (pending := self._take(answer.number)) is None:
            return
        request, number = pending.request, answer.number
        text, stopped_by = before_stop(answer.text, request.stop)
        raw, _ = before_stop(answer.raw or answer.text, request.stop)
        is_prompt = request.prompt is not None
        said = Spoken(text) if is_prompt else spoken(text, raw, self._limits.tool_parser if request.calls else None)
        counts = answer.is_cut, answer.context_tokens, answer.tokens
        tokens = answer.sampled if request.wants_tokens else None
        turn = AgentTurn(f"{self.id}-{number}", int(time.time()), said, *counts, stopped_by, tokens)
        self._last, self._calls[number] = number, dict(turn.calls)
        if is_prompt:
            self._conversation.add_text(number, request.prompt + answer.text if isinstance(request.prompt, str) else None)
        else:
            message = {**turn.message, "content": said.content}
            self._conversation.add(number, request.messages, message, request.tools, instructions=request.instructions)
        pending.answer.set_result(turn)

    def _made(self, after: int, messages: list[Message]) -> list[ToolCall]:
        """The calls of a turn whose results are in these messages. Each one is told once."""
        made = self._calls.get(after, {})
        found = [(made.pop(message.get("tool_call_id", ""), None), message["content"]) for message in messages]
        return [(call.name, call.text, result, 0.0, "") for call, result in found if call is not None]

    def refused(self, number: int, message: str, *, over: bool = False) -> None:
        """Refuses a request, by its number; with `over`, also those that wait and all further ones."""
        if (pending := self._take(number)) is not None:
            self._refuse(pending, RefusedRequestError(400, message, "episode_over" if over else "invalid_request"))
        if over:
            self._end(message)

    def end(self, why: str) -> None:
        """Refuses all requests without an answer, and all further ones. Answers that were given are replayed."""
        self._end(why)
        while self._sampling:
            self._refuse(self._sampling.popitem()[1], RefusedRequestError(400, self.over, "episode_over"))

    def _end(self, why: str) -> None:
        self.over = self.over or why
        while self._waiting:
            self._refuse(self._waiting.popleft(), RefusedRequestError(400, self.over, "episode_over"))

    def _take(self, number: int) -> _Pending | None:
        """Ends the sampling of a request; None: it has ended before."""
        self._changed.set()
        return self._sampling.pop(number, None)

    def _refuse(self, pending: _Pending, error: RefusedRequestError) -> None:
        del self._known[pending.request.digest]
        pending.answer.set_exception(error)


class SessionTable:
    """The open sessions of a server."""

    def __init__(self) -> None:
        self._open: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def opened(self, limits: SessionLimits) -> Iterator[AgentSession]:
        """A session that is open until the end of the block."""
        session = AgentSession(limits)
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
