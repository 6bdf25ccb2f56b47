"""A session: an agent's way to the policy in one episode.

Invariant: a repeated request gets the answer of the first one, which may still be sampled. A request whose streams have all been
closed is withdrawn. What an agent can make a session keep is bounded.
"""

import asyncio
import json
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from polyreme.api.v1.environment_pb2 import AgentRequest, Answer, Delta
from polyreme.dataset.chat import Message
from polyreme_environment.agents.conversation import AgentConversation
from polyreme_environment.agents.message import Spoken, before_stop, spoken, spoken_so_far
from polyreme_environment.agents.reply import AgentTurn, PartialTurn
from polyreme_environment.agents.request import RefusedRequestError, TurnRequest, bad
from polyreme_environment.contract import ToolCall
from polyreme_environment.tool_calls import ParsedCall, beginning

Read = Callable[[Callable[[str], list[Message]]], TurnRequest]
"""Reads a request, by the conversation up to an answer. Raises RefusedRequestError."""
WAITING = 64
"""Maximum number of requests of a session that wait to be asked for."""
_REPEATED = 1 << 20
"""Maximum of what each request repeats: the characters of its tools, or all tokens of its prompt."""


@dataclass(frozen=True)
class SessionLimits:
    """Of a session: characters that a request may add, turns sampled at once, and how calls are written: see `find_calls`."""

    chars: int
    at_once: int
    tool_parser: str


@dataclass(frozen=True)
class Asked:
    """A request and its number, the turn that it follows (0: none) with the messages or the text behind that, and the calls of
    that turn that they answer."""

    number: int
    request: TurnRequest
    after: int
    messages: list[Message]
    text: str | None
    calls: list[ToolCall]


@dataclass(frozen=True)
class Withdrawn:
    """The number of a request whose clients have left."""

    number: int


@dataclass(eq=False)
class _Pending:
    """A request and its answer to be.

    Attributes:
        request: only its digest once it is answered: each request of a conversation repeats all of it.
        number: 0 while it waits.
        so_far: what is certain of the turn; None: nothing has been told of it.
        told: what `so_far` was read from.
        grown: ends, and is replaced, when more is told.
        streams: how many callers follow it as it is sampled.
        is_kept: whether it is sampled to its end without them.
    """

    request: TurnRequest
    answer: "asyncio.Future[AgentTurn]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    number: int = 0
    so_far: PartialTurn | None = None
    told: str = ""
    grown: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    streams: int = 0
    is_kept: bool = False


def agent_request(asked: Asked) -> AgentRequest:
    """The request as the policy's client gets it."""
    request = asked.request
    return AgentRequest(
        messages_json=json.dumps(asked.messages) if asked.messages else "",
        tools_json=json.dumps(request.tools) if request.tools else "",
        after=asked.after,
        max_tokens=request.max_tokens or 0,
        temperature=request.temperature,
        prompt=asked.text,
        context_ids=request.prompt if isinstance(request.prompt, tuple) else (),
        stop=request.stop,
        stop_ids=request.stop_ids,
        wants_tokens=request.wants_tokens,
        number=asked.number,
        streams=request.streams,
    )


class AgentSession:
    """The policy in one episode, as an agent asks for it and as the episode's stream gives it.

    Attributes:
        id: its part of the address.
        key: what its requests must present.
        over: why no turn begins any more; "": turns may begin.
    """

    def __init__(self, limits: SessionLimits, id: str = "") -> None:
        """Args: id: of a session that was kept."""
        self.id, self.key, self.over = id or secrets.token_hex(8), secrets.token_hex(24), ""
        self._limits = limits
        self._conversation = AgentConversation()
        self._known: dict[bytes, _Pending] = {}  # by the requests' digests, answered or not
        self._waiting: deque[_Pending] = deque()
        self._sampling: dict[int, _Pending] = {}  # by the requests' numbers
        self._withdrawn: deque[int] = deque()
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

    async def turn(self, read: Read) -> AgentTurn:
        """The turn that answers what `read` reads. Raises RefusedRequestError."""
        return await self.answer(read(self.history))

    async def answer(self, request: TurnRequest) -> AgentTurn:
        """The turn that answers a request. A cancelled caller leaves the request to its end. Raises RefusedRequestError."""
        pending = self._pending(request)
        pending.is_kept = True
        return await asyncio.shield(pending.answer)

    async def streamed(self, read: Read) -> AsyncGenerator[PartialTurn | AgentTurn, None]:
        """What is certain of the turn that answers what `read` reads, as it is sampled, and at last the turn. A request of which
        something has been told is withdrawn when its last stream is closed. Raises RefusedRequestError."""
        pending = self._pending(replace(read(self.history), streams=True))
        pending.streams += 1
        shown: PartialTurn | None = None
        try:
            while not pending.answer.done():
                waits: set[asyncio.Future[Any]] = {pending.grown, pending.answer}
                if (shown := pending.so_far) is not None:
                    yield shown
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if pending.so_far is not None and pending.so_far is not shown:
                yield pending.so_far  # a refusal may follow it
            yield await asyncio.shield(pending.answer)
        finally:
            pending.streams -= 1
            if pending.so_far is not None and not (pending.streams or pending.is_kept or pending.answer.done()):
                self._withdraw(pending)

    def _pending(self, request: TurnRequest) -> _Pending:
        if (known := self._known.get(request.digest)) is not None:
            return known
        if self.over:
            raise RefusedRequestError(400, self.over, "episode_over")
        if len(self._waiting) >= WAITING:
            raise RefusedRequestError(429, f"expected at most {WAITING} requests of a session that wait; found more", "too_many")
        pending = self._known[request.digest] = _Pending(request)
        pending.answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have left
        self._waiting.append(pending)
        self._changed.set()
        return pending

    async def give(self, amount: float, task: str = "") -> None:
        """Adds to the reward of the turn that was answered last. Raises RefusedRequestError."""
        if not self._last:
            raise RefusedRequestError(400, "expected a turn before its reward; found none", "invalid_request")
        self._rewards[self._last] += amount
        self.is_rewarded = True

    def take_rewards(self) -> dict[int, float]:
        """The rewards since the last call, by the numbers of their turns."""
        rewards, self._rewards = dict(self._rewards), defaultdict(float)
        return rewards

    def take(self) -> Asked | Withdrawn | None:
        """A request that was withdrawn; else the oldest one that waits, when one more turn may be sampled; None: neither. It is
        sampled until `sampled` or `refused`."""
        while not self._withdrawn:
            if not self._waiting or len(self._sampling) >= self._limits.at_once:
                return None
            self._newest += 1
            pending = self._sampling[self._newest] = self._waiting.popleft()
            pending.number = self._newest
            asked = self._placed(self._newest, pending.request)
            fields = [field for message in asked.messages for field in message.items()]
            new = sum(_chars(each) for key, each in fields if key not in ("role", "reasoning")) + len(asked.text or "")
            repeated = _chars(asked.request.tools) + (0 if asked.text else len(asked.request.prompt or ()))
            if new <= (limit := self._limits.chars) and repeated <= _REPEATED:
                return asked
            expected = f"{limit} new characters in a request, and {_REPEATED} of its tools or tokens"
            found = f"expected at most environment.max_message_chars = {expected}; found {new} and {repeated}"
            self.refused(asked.number, found)
        return Withdrawn(self._withdrawn.popleft())

    async def changed(self) -> None:
        """Waits until `take` may give something else than before, or for `wake`. For one caller."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Ends the wait of `changed`."""
        self._changed.set()

    def _placed(self, number: int, request: TurnRequest) -> Asked:
        if isinstance(request.prompt, str):
            after, text = self._conversation.place_text(request.prompt)
            return Asked(number, request, after, [], text, [])
        if request.prompt is not None:
            return Asked(number, request, 0, [], None, [])
        after, messages = self._conversation.place(request.messages, request.digests)
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

    def told(self, delta: Delta) -> PartialTurn | None:
        """Takes what has been sampled of a turn. Returns what is certain of it; None: it has ended before."""
        if (pending := self._sampling.get(delta.number)) is None:
            return None
        pending.told += delta.text
        request, text = pending.request, pending.told
        if request.prompt is not None:
            said = Spoken(beginning(text, request.stop))
        else:
            said = spoken_so_far(text, request.stop, self._parser(request), delta.in_thought)
        created = int(time.time()) if pending.so_far is None else pending.so_far.created
        pending.so_far = PartialTurn(f"{self.id}-{delta.number}", created, said, delta.context_tokens)
        grown, pending.grown = pending.grown, asyncio.get_running_loop().create_future()
        grown.set_result(None)
        return pending.so_far

    def _parser(self, request: TurnRequest) -> str | None:
        return self._limits.tool_parser if request.calls else None

    def known(self, request: TurnRequest) -> AgentTurn | None:
        """The turn that answered this request before."""
        pending = self._known.get(request.digest)
        return pending.answer.result() if pending is not None and pending.answer.done() else None

    def replay(self, asked: Asked, answer: Answer, created: int) -> None:
        """Repeats a turn of a session that was kept: what it asked, as `next` told it, its answer, and the Unix time of that."""
        request = asked.request
        if request.prompt is None:
            before = self._conversation.history(asked.after, instructions=True) or []
            request = replace(request, messages=[*before, *asked.messages])
            self._made(asked.after, asked.messages)
        self._newest = asked.number
        self._known[request.digest] = self._sampling[asked.number] = _Pending(request, number=asked.number)
        self.sampled(answer, created)

    def sampled(self, answer: Answer, created: int | None = None) -> None:
        """Answers a request, by its number. `created`: its Unix time; None: now."""
        if (pending := self._take(answer.number)) is None:
            return
        request, number = pending.request, answer.number
        text, stopped_by = before_stop(answer.text, request.stop)
        raw, _ = before_stop(answer.raw or answer.text, request.stop)
        is_prompt = request.prompt is not None
        said = Spoken(text) if is_prompt else spoken(text, raw, self._parser(request), answer.in_thought)
        counts = answer.is_cut, answer.context_tokens, answer.tokens
        tokens = answer.sampled if request.wants_tokens else None
        if created is None:
            created = int(time.time()) if pending.so_far is None else pending.so_far.created
        turn = AgentTurn(f"{self.id}-{number}", created, said, *counts, stopped_by, tokens)
        self._last, self._calls[number] = number, dict(turn.calls)
        if is_prompt:
            self._conversation.add_text(number, request.prompt + answer.text if isinstance(request.prompt, str) else None)
        else:
            message = {**turn.message, "content": said.content}
            self._conversation.add(number, request.messages, request.digests, message, instructions=request.instructions)
        pending.request = TurnRequest(request.digest)
        pending.answer.set_result(turn)

    def _made(self, after: int, messages: list[Message]) -> list[ToolCall]:
        """The calls of a turn whose results are in these messages. Each one is told once."""
        made = self._calls.get(after, {})
        found = [(made.pop(str(message.get("tool_call_id")), None), message["content"]) for message in messages]
        return [(call.name, call.text, result, 0.0, "") for call, result in found if call is not None]

    def _withdraw(self, pending: _Pending) -> None:
        del self._known[pending.request.digest], self._sampling[pending.number]
        pending.answer.cancel()
        self._withdrawn.append(pending.number)
        self._changed.set()

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


def _chars(value: object) -> int:
    return len(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
