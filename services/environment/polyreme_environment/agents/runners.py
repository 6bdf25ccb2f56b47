"""What runs agents: worker processes for a function, a POST for a program elsewhere.

Invariant: a run ends with a result or an error. The process of a function that goes on although its episode has ended is killed.
"""

import asyncio
import itertools
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from polyreme.config.environment import EnvironmentConfig
from polyreme.isolation.processes import INVALID_MESSAGE, Worker, WorkerExitedError, Workers
from polyreme_environment.agents.result import Result, read_result
from polyreme_environment.contract import ContractError
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, PlayError, start_workers

logger = logging.getLogger(__name__)

_REPLY_BYTES = 1 << 20
_CONNECT_SECONDS = 5.0
_TEXT = 200
"""Characters of a program's reply in an error."""


class Runner(Protocol):
    """Runs an agent.

    Attributes:
        ends_at_bounds: whether an episode that has reached a bound ends with its rewards so far, since the agent can give none after that.
    """

    @property
    def ends_at_bounds(self) -> bool: ...

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the agent."""
        ...

    @property
    def available(self) -> bool: ...

    async def start(self, server: str) -> None:
        """Raises ConfigError or UnavailableError when there is no agent. `server`: http(s)://host:port of the session address."""

    async def close(self) -> None: ...

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> Result:
        """One run. A run that is cancelled ends soon after.

        Raises:
            PlayError: the agent failed.
            EpisodeLostError: through no fault of its own it did not come to an end.
        """
        ...


async def posted(client: httpx.AsyncClient, url: str, body: Any, limit: int) -> tuple[httpx.Response, bytes]:
    """The reply to a POST and its body. Raises httpx.TransportError, and PlayError for a body of more than `limit` bytes."""
    async with client.stream("POST", url, json=body) as reply:
        text = b""
        async for part in reply.aiter_bytes():
            text += part
            if len(text) > limit:
                raise PlayError(f"expected at most {limit} bytes from the agent; found more")
    return reply, text


class UrlRunner:
    """An agent behind a URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # the episode has a deadline
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    about = ("agent", "an agent behind a URL")
    available = True
    ends_at_bounds = False

    async def start(self, server: str) -> None:
        """Does nothing: the agent may start later."""

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> Result:
        """See `Runner`."""
        body = {"task": task, "base_url": base_url, "api_key": api_key}
        try:
            reply, text = await posted(self._client, self._url, body, _REPLY_BYTES)
        except httpx.ConnectError as error:
            raise EpisodeLostError(f"the agent at {self._url} cannot be reached: {error}") from None
        except httpx.TransportError as error:
            raise PlayError(f"the agent at {self._url} broke off: {error or type(error).__name__}") from None
        if not reply.is_success:
            raise PlayError(f"the agent answered {reply.status_code}: {text.decode(errors='replace'):.{_TEXT}}")
        try:
            return read_result(json.loads(text))
        except (ValueError, RecursionError, ContractError) as error:
            raise PlayError(f"the agent's answer: {error}") from None


@dataclass
class _Place:
    """The place of one worker process, with the runs in it. A run ends with its result, or with what failed."""

    worker: Worker | None
    runs: "dict[int, asyncio.Future[Result | str]]" = field(default_factory=dict)


class FunctionRunner:
    """A Python function in worker processes."""

    ends_at_bounds = False

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._workers: Workers | None = None
        self._places: list[_Place] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _processes(self) -> Workers:
        assert self._workers is not None, "`start` comes first"
        return self._workers

    @property
    def about(self) -> tuple[str, str]:
        return self._processes.facts[0][:2]

    @property
    def available(self) -> bool:
        return any(place.worker is not None for place in self._places)

    async def start(self, server: str) -> None:
        """See `Runner`."""
        setup = {"function": self._config.function}
        self._workers, first = await start_workers("polyreme_environment.agents.worker", self._config, setup)
        for worker in first:
            self._places.append(place := _Place(worker))
            self._keep(self._read(place))

    async def close(self) -> None:
        """Ends all workers and the processes that they started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers is not None:
            self._workers.close()

    async def run(self, task: dict[str, Any], base_url: str, api_key: str) -> Result:
        """See `Runner`."""
        usable = [place for place in self._places if place.worker is not None]
        if not usable:
            raise EpisodeLostError("there is no worker process")
        place = min(usable, key=lambda place: len(place.runs))
        worker, number = place.worker, next(self._numbers)
        assert worker is not None
        ended = place.runs[number] = asyncio.get_running_loop().create_future()
        try:
            await worker.send({"number": number, "run": [task, base_url, api_key]})
            reply = await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._keep(self._end(place, worker, number, ended))
            raise
        if isinstance(reply, str):
            raise PlayError(f"the agent: {reply}")
        return reply

    async def _end(self, place: _Place, worker: Worker, number: int, ended: "asyncio.Future[Result | str]") -> None:
        """Cancels a run. Kills its process when that has no effect."""
        await worker.send({"number": number, "cancel": True})
        await asyncio.wait({ended}, timeout=self._config.step_timeout)
        if not ended.done() and place.worker is worker:
            logger.warning("an agent went on for %g s after its episode; its process is killed", self._config.step_timeout)
            self._metrics.workers_replaced.labels("timeout").inc()
            self._processes.discard(worker)

    async def _read(self, place: _Place) -> None:
        """Gives each reply to its run, and replaces the worker when it ends."""
        while True:
            assert place.worker is not None
            why = await self._read_all(place.worker, place.runs)
            self._processes.discard(place.worker)
            place.worker = None
            lost, place.runs = place.runs, {}
            for run in lost.values():
                run.set_exception(EpisodeLostError(f"the worker process {why}, because of this agent or another one"))
                run.exception()  # its caller may have left
            place.worker = await self._processes.respawn(lambda reason: None)

    async def _read_all(self, worker: Worker, runs: "dict[int, asyncio.Future[Result | str]]") -> str:
        """Reads replies, which user code in the process could have written, until it ends or breaks the protocol. Returns how it ended."""
        try:
            while True:
                reply = await worker.receive()
                if printed := reply.pop("printed", ""):
                    logger.info("an agent printed: %s", printed)
                read: Result | str
                read = (
                    str(reply["error"]) if "error" in reply else read_result({key: reply[key] for key in ("reward", "metrics")})
                )
                runs.pop(reply["number"]).set_result(read)
        except WorkerExitedError as gone:
            self._metrics.workers_replaced.labels("exit").inc()
            return str(gone)
        except (ContractError, *INVALID_MESSAGE) as bad:
            self._metrics.workers_replaced.labels("reply").inc()
            return f"sent an invalid reply ({bad})"

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
