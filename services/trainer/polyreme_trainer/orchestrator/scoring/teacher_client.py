"""Requests the log-probabilities of sampled tokens from the teacher's servers.

Invariant: a failure is retried, then the group's attempt fails; no number ever replaces it. Every request has a deadline. A
server gets no sample before its vocabulary has been compared with the policy's.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from numpy.typing import NDArray

from polyreme.config.security import EndpointSecurity
from polyreme.config.teacher import TeacherConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.run import Run
from polyreme.net import tls
from polyreme.net.direct_http import UNCOMPRESSED, ReplyError, read_reply
from polyreme.process.backoff import Backoff
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.scoring import teacher_protocol
from polyreme_trainer.orchestrator.scoring.teacher_protocol import TeacherReplyError, TokenLogprobs

logger = logging.getLogger(__name__)

RETRY_BACKOFF = Backoff(first=0.5, longest=10.0)
_REST_SECONDS = 5.0  # seconds for which a failed server is the last choice
_PROBED = 256  # number of ids whose texts are compared
_REPLY_BYTES = 128 << 20
_PASSING = (408, 425, 429)


class TeacherError(Exception):
    """A response has no log-probabilities under the teacher, so this attempt at its group has failed."""


class _FailedRequest(Exception):
    """A failed request whose repetition after `wait` seconds may succeed."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(eq=False)
class _Server:
    url: str
    model: str = ""
    open_requests: int = 0
    rest_until: float = 0.0


class TeacherClient:
    """A client of all servers of the teacher. Call `check` before anything else.

    Args:
        run: receives the notices.
        config: the section `teacher`.
        backoff: the pauses between two requests of which the first has failed.

    Raises:
        ConfigError: a file or token of `config.security` cannot be used.
    """

    def __init__(self, run: Run, config: TeacherConfig, backoff: Backoff = RETRY_BACKOFF) -> None:
        self._run, self._config, self._backoff = run, config, backoff
        self._servers = [_Server(url) for url in config.urls]
        self._places = asyncio.Semaphore(config.concurrency)
        self._answered_at = float("-inf")
        self._down_since: float | None = None
        headers = {"content-type": "application/json", **UNCOMPRESSED}
        if config.security is not None and (token := tls.token(config.security)) is not None:
            headers["authorization"] = f"Bearer {token}"
        uses_tls = any(url.startswith("https:") for url in config.urls)
        self._client = httpx.AsyncClient(
            timeout=None,  # the deadline around each request is ours
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
            verify=tls.client_context(config.security or EndpointSecurity()) if uses_tls else False,
            headers=headers,
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def check(self, template: Template, longest: int) -> None:
        """Finds the model on each server and compares vocabularies. Waits for servers that are starting.

        Args:
            template: the policy's template.
            longest: maximum tokens of a prompt with its response.

        Raises:
            ConfigError: the model does not exist, accepts fewer tokens, or has another vocabulary.
            UnavailableError: a server does not answer within `outage_timeout`.
        """
        for server in self._servers:
            try:
                listed = await self._request("models", None, server)
                server.model, takes = teacher_protocol.model_of(listed, self._config.model)
                if takes is not None and takes < longest + 1:
                    raise TeacherReplyError(
                        f"expected a max_model_len of {longest + 1} tokens, one more than a prompt and its response; "
                        f"found {takes}"
                    )
                await self._compare_vocabularies(server, template, longest)
            except (TeacherError, TeacherReplyError) as error:
                raise ConfigError(
                    "a teacher that can judge the policy's tokens",
                    f"{server.url}: {error}",
                    "Fix the section `teacher`, or how its server was started.",
                ) from None

    async def logprobs(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> NDArray[np.float32]:
        """float32 [response], the log-probability of each token given all previous ones, at temperature 1.

        Raises:
            TeacherError: this request fails while others succeed.
            UnavailableError: no request has been answered for `outage_timeout` seconds.
        """
        ids = [int(each) for each in (*prompt_ids, *response_ids)]
        return (await self._judged(ids, None)).logprobs[len(prompt_ids) - 1 :]

    async def _compare_vocabularies(self, server: _Server, template: Template, longest: int) -> None:
        spaced = np.linspace(0, min(template.tokens, template.embeddings) - 1, _PROBED).astype(int)
        probe = sorted({*map(int, spaced), *template.stop_ids})
        size = max(1, min(len(probe), longest - 1))
        texts: list[str] = []
        for start in range(0, len(probe), size):
            texts += (await self._judged([probe[0], *probe[start : start + size]], server)).texts
        own = template.decode([[each] for each in probe], special=True)
        if found := teacher_protocol.differing(probe, own, texts):
            raise TeacherReplyError(
                f"expected the policy's vocabulary, in which id {found[0]} is {found[1]!r}; found {found[2]!r}"
            )

    async def _judged(self, ids: list[int], only: _Server | None) -> TokenLogprobs:
        body = teacher_protocol.request(ids, self._config.protocol)
        try:
            return teacher_protocol.parse(await self._request("completions", body, only), ids, self._config.protocol)
        except TeacherReplyError as error:
            raise TeacherError(str(error)) from None

    async def _request(self, path: str, body: dict[str, object] | None, only: _Server | None) -> object:
        """The JSON of a 200, from the server `only` or from the least busy one. Raises TeacherError, UnavailableError."""
        failures, since = 0, time.monotonic()
        while True:
            try:
                async with self._places:
                    now = time.monotonic()
                    server = only or min(self._servers, key=lambda s: (s.rest_until > now, s.open_requests))
                    answer = await self._send(server, path, body)
            except _FailedRequest as failure:
                failures += 1
                server.rest_until = time.monotonic() + _REST_SECONDS
                await self._judge(failures, since, str(failure))
                await asyncio.sleep(max(self._backoff.draw(failures), failure.wait))
            else:
                self._answered_at, self._down_since = time.monotonic(), None
                return answer

    async def _judge(self, failures: int, since: float, reason: str) -> None:
        """Raises when another request is pointless; emits a notice when an outage begins."""
        if self._answered_at > since:
            if failures >= self._config.tries:
                raise TeacherError(f"the teacher has failed {failures} times for one response: {reason}")
            return
        now = time.monotonic()
        begins = self._down_since is None
        down_since = self._down_since = now if self._down_since is None else self._down_since
        if now - down_since >= self._config.outage_timeout:
            raise UnavailableError(
                f"a teacher that answers within teacher.outage_timeout = {self._config.outage_timeout:.0f} s",
                reason,
                "Start its server, or fix the section `teacher`; then continue with --resume.",
            )
        if begins:
            text = f"the teacher does not answer ({reason}); requests are repeated for {self._config.outage_timeout:.0f} s"
            logger.warning("%s", text)
            await self._run.emit(ServiceNotice(service="orchestrator", text=text))

    async def _send(self, server: _Server, path: str, body: dict[str, object] | None) -> object:
        """The JSON of a 200. Raises _FailedRequest and TeacherError."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps({"model": server.model, **body}).encode())
        url = f"{server.url}/{path}"
        server.open_requests += 1
        try:
            async with asyncio.timeout(self._config.timeout), self._client.stream(method, url, content=content) as response:
                data = await read_reply(response, _REPLY_BYTES)
        except ReplyError as error:
            raise TeacherError(f"{url}: {error}") from None
        except TimeoutError:
            raise _FailedRequest(f"{url}: expected an answer within {self._config.timeout:g} s; found none") from None
        except (httpx.HTTPError, OSError) as error:  # OSError: a TLS alert in the middle of a reply
            raise _FailedRequest(f"{url}: expected an HTTP reply; found {error or type(error).__name__}") from None
        finally:
            server.open_requests -= 1
        if response.status_code == 200:
            try:
                return await asyncio.to_thread(json.loads, data)
            except (ValueError, RecursionError) as error:
                raise TeacherError(f"{url}: expected JSON; found {data[:100]!r} ({error})") from None
        problem = f"{url}: expected HTTP 200; found {response.status_code}: {data[:300].decode('utf-8', 'replace').strip()}"
        if response.status_code >= 500 or response.status_code in _PASSING:
            wait = response.headers.get("retry-after", "")
            raise _FailedRequest(problem, min(60.0, float(wait)) if wait.isdecimal() else 0.0)
        advice = ". The server may require a token: see teacher.security" if response.status_code in (401, 403) else ""
        raise TeacherError(problem + advice)
