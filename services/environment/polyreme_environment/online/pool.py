"""The sessions of a running product on a server, and their turns, which the trainer's streams sample.

Invariant: a server keeps nothing of a session, so any server of the run answers for any session. A turn whose stream is lost
waits for another stream, or its client is told so. Turns in progress, and requests of a session, are bounded.
"""

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig, OnlineConfig
from polyreme.experience.online import OnlineSessions, session_key
from polyreme.experience.run import Run
from polyreme.process.tasks import end_all
from polyreme_environment.agents.reply import AgentTurn, PartialTurn
from polyreme_environment.agents.request import RefusedRequestError
from polyreme_environment.agents.session import WAITING, AgentSession, Read, SessionLimits
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.online.session import turn_parts
from polyreme_environment.pool import AgentMoved, EpisodeLostError

_REFUSALS = {
    "unknown": (404, "expected the id of a session; found none with this id, or it ended long ago", "not_found"),
    "dropped": (410, "expected a session that may get a reward; found one that is dropped: see its state", "dropped"),
    "other": (409, "expected the reward that this session has; found another one", "conflict"),
    "empty": (400, "expected a turn before its reward; found none", "invalid_request"),
    "task": (400, "expected the session's `task`, since rewards are compared within a group of one task; found another one,"
                  " or none", "invalid_request"),
    "conflict": (409, "expected one request of a session at once; another server has answered one meanwhile", "conflict"),
}  # fmt: skip


@dataclass(eq=False)
class _Wanted:
    """A turn that waits for a stream, and then for its answer.

    Attributes:
        said: what its stream has said of it, at most a Delta for each token; None: the stream was lost.
        left: set when nobody wants it any more.
        is_answered: whether its stream is free. Its client may still be reading.
    """

    request: pb.AgentRequest
    said: "asyncio.Queue[pb.Delta | pb.Answer | None]" = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    is_answered: bool = False


class OnlineTurn:
    """A stream, which samples one turn. `wanted`: waits for a requested turn, and raises EpisodeLostError when none comes."""

    def __init__(self, wanted: Callable[[], Awaitable[_Wanted]], metrics: EnvironmentMetrics) -> None:
        self._wanted, self._metrics = wanted, metrics

    async def play(self, row: Mapping[str, object], answers: AsyncIterator[pb.RunRequest]) -> AsyncGenerator[AgentMoved, None]:
        """Yields the request, and the end after its answer, or a withdrawal when nobody wants it. See `AgentEpisode.play`."""
        wanted = await self._wanted()
        left = asyncio.create_task(wanted.left.wait())
        reading = asyncio.ensure_future(anext(answers, None))
        try:
            with self._metrics.playing.track_inprogress():
                yield AgentMoved(agent=wanted.request)
                while not wanted.is_answered:
                    await asyncio.wait((left, reading), return_when=asyncio.FIRST_COMPLETED)
                    if left.done():
                        yield AgentMoved(withdrawn=wanted.request.number)
                        return
                    if (request := reading.result()) is None:
                        return
                    wanted.is_answered = request.HasField("answer")
                    wanted.said.put_nowait(request.answer if wanted.is_answered else request.delta)
                    reading = reading if wanted.is_answered else asyncio.ensure_future(anext(answers, None))
            yield AgentMoved(done=True)
        finally:
            if not wanted.is_answered:
                wanted.said.put_nowait(None)
            await end_all((left, reading))


class OnlinePool:
    """The sessions of a running product, in place of an `EpisodePool`.

    Args:
        run: keeps the sessions.
        key: opens sessions, and gives rewards to all.
        grouped: whether rewards are compared, so that each session needs a task.

    Attributes:
        store: the sessions.
        url: `environment.online.url`.
    """

    about = "online", "sessions of a running product"
    available = True

    def __init__(
        self, config: EnvironmentConfig, metrics: EnvironmentMetrics, settings: OnlineConfig, run: Run, key: str, *, grouped: bool
    ) -> None:
        self._config, self._metrics, self._settings, self._key, self._grouped = config, metrics, settings, key, grouped
        self.store, self.url = OnlineSessions(run, settings.max_age), settings.url
        self._waiting: deque[_Wanted] = deque()
        self._ready = asyncio.Semaphore(0)  # at least one for each that waits
        self._streams, self._asked, self._draining = 0, set[_Wanted](), False
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        """Ends the streams that wait."""
        self._draining = value
        for _ in range(self._streams if value else 0):
            self._ready.release()

    async def start(self) -> None:
        """Does nothing: the product comes when it likes."""

    async def close(self) -> None:
        self.draining = True

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[OnlineTurn]:
        """A stream."""
        self._streams += 1
        try:
            yield OnlineTurn(self._next, self._metrics)
        finally:
            self._streams -= 1

    async def _next(self) -> _Wanted:
        """The oldest turn that waits. Raises EpisodeLostError."""
        while True:
            await self._ready.acquire()
            if self._waiting:
                return self._waiting.popleft()
            if self._draining:
                raise EpisodeLostError("the server is draining")

    # -- what the address does

    def check_key(self, key: str, id: str | None = None) -> None:
        """Raises RefusedRequestError unless this is the key that opens sessions, or that of session `id`."""
        valid = [self._key, *([] if id is None else [self.key_of(id)])]
        if not any([hmac.compare_digest(key.encode(), each.encode()) for each in valid]):
            raise RefusedRequestError(
                401, "expected the key of environment.online.key_env; found another one, or none", "invalid_api_key"
            )

    async def open(self, task: str) -> "tuple[str, str, bool]":
        """Opens a session. Returns its id, its key, and whether it is kept. Raises RefusedRequestError."""
        id, most = secrets.token_hex(8), self._settings.max_sessions
        kept = await self.store.open(id, task, most)
        if not kept:
            serves = self._settings.overflow == "serve"
            await self.store.count("unrecorded" if serves else "refused")
            if not serves:
                raise RefusedRequestError(
                    429, f"expected at most environment.online.max_sessions = {most} sessions; found as many", "too_many_sessions"
                )
            id = f"u{id}"
        return id, self.key_of(id), kept

    def key_of(self, id: str) -> str:
        """The key of a session."""
        return session_key(self._key, id)

    def find(self, key: str, id: str | None) -> "_Session":
        """See `address.Find`."""
        own = key.partition(".")[0]
        if not hmac.compare_digest(self.key_of(own).encode(), key.encode()) or id not in (None, own):
            raise RefusedRequestError(401, "expected the api key of this session; found another one, or none", "invalid_api_key")
        return _Session(self, own)

    async def reward(self, id: str, reward: float, task: str) -> None:
        """Ends a session with its reward. Raises RefusedRequestError."""
        if id.startswith("u"):
            raise RefusedRequestError(
                409, "expected a session that is kept; found one beyond environment.online.max_sessions", "unrecorded"
            )
        if (found := await self.store.reward(id, reward, task, grouped=self._grouped)) != "ok":
            raise RefusedRequestError(*_REFUSALS[found])

    async def parts(self, id: str, read: Read, *, streams: bool) -> AsyncGenerator[PartialTurn | AgentTurn, None]:
        """What is certain of the turn for a session's request, if it `streams`, and then the turn. Raises RefusedRequestError."""
        async with self._one_at_a_time(id):
            kept = None if id.startswith("u") else await self.store.read(id)
            if kept is not None and kept.state == "unknown":
                raise RefusedRequestError(
                    401, "expected the api key of an open session; its session has ended", "invalid_api_key"
                )
            session = AgentSession(SessionLimits(self._config.max_message_chars, 1, self._config.tool_parser), id)
            async with aclosing(turn_parts(session, kept, self, read, streams=streams)) as parts:
                async for part in parts:
                    yield part

    @asynccontextmanager
    async def _one_at_a_time(self, id: str) -> AsyncIterator[None]:
        lock, count = self._turns.get(id, (asyncio.Lock(), 0))
        if count >= WAITING:
            raise RefusedRequestError(429, f"expected at most {WAITING} requests of a session at once; found more", "too_many")
        self._turns[id] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            _, count = self._turns.pop(id)
            if count > 1:
                self._turns[id] = lock, count - 1

    async def keep(self, id: str, number: int, exchange: pb.SessionExchange) -> None:
        """See `TurnKeeper`."""
        found = await self.store.add_turn(id, number, exchange.SerializeToString(), exchange.answer.oldest_version)
        if found in _REFUSALS:
            raise RefusedRequestError(*_REFUSALS[found])
        if found != "ok":
            raise RefusedRequestError(400, f"expected an open session; found one that is {found}", "episode_over")

    async def sample(self, request: pb.AgentRequest) -> AsyncGenerator[pb.Delta | pb.Answer, None]:
        """See `TurnKeeper`. A turn whose stream is lost waits for another one, unless something of it has been told."""
        if sum(not each.is_answered for each in self._asked) >= self._config.episodes:
            self._metrics.refused.inc()
            raise RefusedRequestError(
                429, f"expected at most environment.episodes = {self._config.episodes} turns at once; found more", "too_many"
            )
        deadline, wanted = asyncio.get_running_loop().time() + self._config.max_seconds, self._ask(request)
        has_told = False
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    said = await wanted.said.get()
                if said is not None:
                    yield said
                    if isinstance(said, pb.Answer):
                        return
                    has_told = True
                elif has_told:
                    raise RefusedRequestError(503, "expected the whole turn; found that its stream was lost: ask again", "lost")
                else:
                    self._asked.discard(wanted)
                    wanted = self._ask(request)
        except TimeoutError:
            raise RefusedRequestError(
                503, f"expected an answer within environment.max_seconds = {self._config.max_seconds:g}; found none", "no_answer"
            ) from None
        finally:
            self._asked.discard(wanted)
            wanted.left.set()
            if wanted in self._waiting:
                self._waiting.remove(wanted)

    def _ask(self, request: pb.AgentRequest) -> _Wanted:
        """Lets a turn wait for a stream."""
        wanted = _Wanted(request)
        self._asked.add(wanted)
        self._waiting.append(wanted)
        self._ready.release()
        return wanted


@dataclass(frozen=True)
class _Session:
    """See `OpenSession`."""

    pool: OnlinePool
    id: str

    async def turn(self, read: Read) -> AgentTurn:
        async with aclosing(self.pool.parts(self.id, read, streams=False)) as parts:
            [turn] = [part async for part in parts if isinstance(part, AgentTurn)]
        return turn

    def streamed(self, read: Read) -> AsyncGenerator[PartialTurn | AgentTurn, None]:
        return self.pool.parts(self.id, read, streams=True)

    async def give(self, amount: float, task: str = "") -> None:
        await self.pool.reward(self.id, amount, task)
