"""What runs agents: worker processes for a function, a POST for a program elsewhere.

Invariant: a run ends with a result or an error.
"""

import json
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Protocol

import httpx

from polyreme.config.environment import EnvironmentConfig
from polyreme.net.direct_http import UNCOMPRESSED, ReplyError, read_reply
from polyreme_environment.agents.result import Result, read_result
from polyreme_environment.contract import ContractError
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, PlayError
from polyreme_environment.worker_calls import EpisodeWorkers

_REPLY_BYTES = 1 << 20
_CONNECT_SECONDS = 30.0  # a server that begins thousands of runs takes longer than a connection does
_TEXT = 200
"""Characters of a program's reply in an error."""


class Runner(Protocol):
    """Runs an agent.

    Attributes:
        ends_at_bounds: whether an episode that reached a bound ends with its rewards so far, since the agent can give none then.
    """

    @property
    def ends_at_bounds(self) -> bool: ...

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the agent."""

    @property
    def available(self) -> bool: ...

    async def start(self, server: str) -> None:
        """Raises ConfigError or UnavailableError when there is no agent. `server`: http(s)://host:port of the session address."""

    async def close(self) -> None:
        """Called after `start`, also after one that failed."""

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        """One run. A run that is cancelled ends soon after.

        Raises:
            PlayError: the agent failed.
            EpisodeLostError: through no fault of its own it did not come to an end.
            FullError: it has not begun, since there is no room at the moment.
        """


async def posted(url: str, body: object, limit: int) -> tuple[httpx.Response, bytes]:
    """The reply to a POST and its body, however long it takes: the episode has a deadline.

    Each has a client of its own: one for all would look at all of its connections, such as those of 2,000 agents, for each
    request, and would keep their cookies.

    Raises httpx.TransportError, and PlayError for a body of more than `limit` bytes or a compressed one.
    """
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    client = httpx.AsyncClient(timeout=timeout, headers=UNCOMPRESSED, verify=_certificates(), trust_env=False)
    async with client, client.stream("POST", url, json=body) as reply:
        try:
            return reply, await read_reply(reply, limit)
        except ReplyError as error:
            raise PlayError(f"the agent's reply: {error}") from None


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


class UrlRunner:
    """An agent behind a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    about = ("agent", "an agent behind a URL")
    available = True
    ends_at_bounds = False

    async def start(self, server: str) -> None:
        """Does nothing: the agent may start later."""

    async def close(self) -> None:
        """Does nothing: each run ends by itself."""

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        """See `Runner`."""
        body = {"task": task, "base_url": base_url, "api_key": api_key}
        try:
            reply, text = await posted(self._url, body, _REPLY_BYTES)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EpisodeLostError(f"the agent at {self._url} cannot be reached: {error or type(error).__name__}") from None
        except httpx.TransportError as error:
            raise PlayError(f"the agent at {self._url} broke off: {error or type(error).__name__}") from None
        if not reply.is_success:
            raise PlayError(f"the agent answered {reply.status_code}: {text.decode(errors='replace'):.{_TEXT}}")
        try:
            return read_result(json.loads(text))
        except (ValueError, RecursionError, ContractError) as error:
            raise PlayError(f"the agent's answer: {error}") from None


class FunctionRunner:
    """A Python function in worker processes."""

    ends_at_bounds = False

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._function = config.function
        self._workers = EpisodeWorkers(
            "polyreme_environment.agents.worker", config, metrics, config.episodes, config.step_timeout
        )

    @property
    def about(self) -> tuple[str, str]:
        return self._workers.about

    @property
    def available(self) -> bool:
        return bool(self._workers.usable)

    async def start(self, server: str) -> None:
        """See `Runner`."""
        await self._workers.start({"function": self._function})

    async def close(self) -> None:
        """Ends all workers and the processes that they started."""
        await self._workers.close()

    async def run(self, task: dict[str, object], base_url: str, api_key: str) -> Result:
        """See `Runner`. A function that goes on although its run was cancelled keeps its process from further runs."""
        worker = self._workers.take()
        try:
            result: Result = await worker.call("the agent", {"run": [task, base_url, api_key]}, None, _result_of)
        finally:
            worker.leave()
        return result


def _result_of(reply: Mapping[str, object]) -> Result:
    return read_result({key: reply[key] for key in ("reward", "metrics")})
