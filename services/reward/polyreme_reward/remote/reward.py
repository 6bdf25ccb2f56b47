"""A reward that another server computes.

Invariant: no request outlives the deadline of its items, and at most `concurrency` requests are open. Every failure to get a
finite number in range becomes a status. Texts and token are sent to the configured origins only.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import httpx
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from polyreme.config.security import EndpointSecurity
from polyreme.errors import ConfigError
from polyreme.net import tls as secure
from polyreme.net.direct_http import UNCOMPRESSED, ReplyError, read_reply
from polyreme.process.backoff import Backoff
from polyreme_reward.items import Item, Outcome, RewardError, Status, failed
from polyreme_reward.remote.endpoints import RewardEndpoint, RewardEndpoints
from polyreme_reward.remote.protocols import PROTOCOLS, BadReply, parse
from polyreme_reward.remote.trouble import explain, refused

_REPLY_BYTES = 32 << 20
_BACKOFF = Backoff(first=0.1, longest=60.0)
_CONNECT_SHARE = 0.3  # fraction of an item's time; leaves time for another endpoint after one that is unreachable
_NOBODY_THERE = (502, 503, 504)
_REPEAT_ELSEWHERE = (307, 308)
_REDIRECTS = 3


@checked(frozen=True, config={"extra": "forbid"})
class HttpOptions:
    """The `options` of an HTTP reward.

    Args:
        concurrency: maximum number of open requests.
        batch: items per request. Above 1, the item deadline applies to the whole request, and a batch that the server refuses is
            resent one item at a time.
        tries: maximum number of requests for the same items within their deadline.
        min: lowest valid score.
        max: highest valid score.
        tokens: whether the endpoint gets the response's tokens; native protocol only.
    """

    concurrency: int = 16
    batch: int = 1
    tries: int = 4
    min: float = float("-inf")
    max: float = float("inf")
    tokens: bool = False


@dataclass
class _Failure:
    status: Status
    message: str
    answered: bool  # the server replied, so one item of the batch may be the cause
    wait: float = 0.0  # minimum seconds before the next request, from the server


class _Reply(NamedTuple):
    status: int
    wait: float  # seconds, from the header retry-after
    body: bytes
    target: str = ""  # target of a redirect


class HttpReward:
    """A reward behind one or more URLs with the same protocol.

    Args:
        name: name of the reward.
        weight: weight of the reward in a score.
        urls: URLs that share the load.
        protocol: a key of PROTOCOLS.
        item_timeout: seconds per item, including retries but not the wait for a free connection.
        options: the fields of HttpOptions.
        security: CA of an https endpoint, client certificate and token, or None.

    Raises:
        ConfigError: an option is unknown or invalid, or a file or token of `security` cannot be used.
    """

    available = True
    correctness = False

    def __init__(
        self,
        name: str,
        weight: float,
        urls: Sequence[str],
        protocol: str,
        item_timeout: float,
        options: dict[str, object],
        security: EndpointSecurity | None = None,
    ) -> None:
        try:
            self._options = TypeAdapter(HttpOptions).validate_python(options)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            known = ", ".join(HttpOptions.__dataclass_fields__)
            raise ConfigError(f"options of an HTTP reward ({known})", problems, "Fix reward.rewards.") from None
        if self._options.tokens and protocol != "native":
            raise ConfigError(
                "options.tokens with protocol native, whose items may have tokens", f"protocol {protocol}", "Fix reward.rewards."
            )
        for url in urls:
            _check(url)
        self.reads_tokens = self._options.tokens
        self.name, self.weight = name, weight
        self.description = f"{protocol} endpoint {', '.join(urls)}"
        self.version = (
            f"{protocol}-{hashlib.sha256(json.dumps([sorted(urls), options], sort_keys=True).encode()).hexdigest()[:8]}"
        )
        self._protocol = PROTOCOLS[protocol]
        self._item_timeout = item_timeout
        self._security = security
        self._outage = ""  # why the last request reached no server
        self._endpoints = RewardEndpoints(urls, item_timeout)
        self._slots = asyncio.Semaphore(self._options.concurrency)
        self._headers = {"content-type": "application/json", **UNCOMPRESSED}
        if security is not None and (token := secure.token(security)) is not None:
            self._headers["authorization"] = f"Bearer {token}"
        uses_tls = any(url.startswith("https:") for url in urls)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_SHARE * item_timeout),  # `_ask` enforces the total deadline
            limits=httpx.Limits(max_connections=self._options.concurrency, max_keepalive_connections=self._options.concurrency),
            verify=secure.client_context(security or EndpointSecurity()) if uses_tls else False,
            trust_env=False,
        )

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        size = self._options.batch
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        return [outcome for part in await asyncio.gather(*map(self._batch, batches)) for outcome in part]

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _batch(self, items: Sequence[Item]) -> list[Outcome]:
        async with self._slots:
            answer = await self._ask(items)
        if isinstance(answer, list):
            return [self._ranged(outcome) for outcome in answer]
        if len(items) > 1 and answer.answered:
            return [outcome for part in await asyncio.gather(*(self._batch([item]) for item in items)) for outcome in part]
        return [failed(answer.status, answer.message)] * len(items)

    async def _ask(self, items: Sequence[Item]) -> list[Outcome] | _Failure:
        """Requests the outcomes, with retries when they may help."""
        try:
            if not self.reads_tokens:
                items = [item._replace(token_ids=(), token_texts=()) for item in items]
            body = json.dumps(self._protocol.encode(items), allow_nan=False).encode()
        except ValueError as error:
            return _Failure(Status.ERROR, f"expected metadata_json with values of JSON; found {error}", answered=True)
        except RewardError as error:
            return _Failure(Status.ERROR, str(error), answered=True)
        last, endpoint = _Failure(Status.TIMEOUT, "", answered=False), None
        try:
            async with asyncio.timeout(self._item_timeout) as deadline:
                for attempt in range(self._options.tries):
                    if attempt:
                        pause = max(_BACKOFF.delay(attempt), last.wait) * random.uniform(1.0, 1.5)
                        if asyncio.get_running_loop().time() + pause >= (deadline.when() or 0.0):
                            break
                        await asyncio.sleep(pause)
                    endpoint = self._endpoints.take()
                    if endpoint is None:
                        wait = self._endpoints.next_probe()
                        why = f"{self.description} does not answer ({self._outage}); next probe in {wait:.1f} s"
                        return _Failure(Status.ERROR, why, False)
                    answer, again = await self._request(endpoint, body, items)
                    endpoint = None
                    if isinstance(answer, list):
                        return answer
                    last = answer
                    if not again:
                        break
        except TimeoutError:
            if endpoint is not None:
                self._endpoints.record_missed_deadline(endpoint)
            before = f"; before that: {last.message}" if last.message else ""
            return _Failure(Status.TIMEOUT, f"expected an answer within {self._item_timeout:g} s; found none{before}", False)
        return last

    async def _request(
        self, endpoint: RewardEndpoint, body: bytes, items: Sequence[Item]
    ) -> tuple[list[Outcome] | _Failure, bool]:
        """Makes one request. Returns its outcomes or failure, and whether a retry may help."""
        alive: bool | None = None
        reply = _Reply(0, 0.0, b"")
        try:
            reply = await self._post(endpoint.url, body)
            alive = reply.status not in _NOBODY_THERE
            return parse(reply.status, reply.body, self._protocol, items), False
        except BadReply as error:
            text = f"{endpoint.url}: {error}{refused(reply.status, self._security)}"
            self._outage = text if alive is False else self._outage
            return _Failure(error.status, text, True, reply.wait), error.again
        except (httpx.HTTPError, OSError) as error:  # OSError: a TLS alert during a reply
            alive = False if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else None
            why, again = explain(error, endpoint.url, self._security)
            text = f"{endpoint.url}: {why}"
            self._outage = text if alive is False else self._outage
            return _Failure(Status.ERROR, text, answered=False), again or self._endpoints.count > 1
        finally:
            self._endpoints.give_back(endpoint, alive)

    async def _post(self, url: str, body: bytes) -> _Reply:
        """The reply of `url`, after redirects within the same origin."""
        for _ in range(_REDIRECTS + 1):
            reply = await self._post_once(url, body)
            if not reply.target:
                return reply
            target = httpx.URL(url).join(reply.target)
            if reply.status not in _REPEAT_ELSEWHERE or not _same_origin(httpx.URL(url), target):
                kind = (
                    "a redirect to another origin" if reply.status in _REPEAT_ELSEWHERE else "a redirect that drops the request"
                )
                raise BadReply(
                    f"expected HTTP 200; found {reply.status}, {kind}: {target}. Set the reward's url to the final address"
                )
            url = str(target)
        raise BadReply(f"expected HTTP 200; found more than {_REDIRECTS} redirects, the last one to {url}")

    async def _post_once(self, url: str, body: bytes) -> _Reply:
        async with self._client.stream("POST", url, content=body, headers=self._headers) as response:
            try:
                reply = await read_reply(response, _REPLY_BYTES)
            except ReplyError as error:
                raise BadReply(str(error), Status.INVALID) from None
            wait = response.headers.get("retry-after", "")
            target = response.headers.get("location", "") if response.is_redirect else ""
            return _Reply(response.status_code, float(wait) if wait.isdecimal() else 0.0, reply, target)

    def _ranged(self, outcome: Outcome) -> Outcome:
        low, high = self._options.min, self._options.max
        if outcome.status is Status.OK and not low <= outcome.value <= high:
            return failed(Status.INVALID, f"expected a score in [{low:g}, {high:g}]; found {outcome.value:g}")
        return outcome


def _same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    ports = {"http": 80, "https": 443}
    return (one.scheme, one.host, one.port or ports.get(one.scheme)) == (
        other.scheme,
        other.host,
        other.port or ports.get(other.scheme),
    )


def _check(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError("a valid URL of a reward server", f"{url!r} ({error})", "Fix reward.rewards.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError("a URL like http://host:8731/", repr(url), "Fix reward.rewards.")
    if parsed.userinfo:
        raise ConfigError("a URL without a password", f"a password for {parsed.host}", "Use a token instead: security.token_env.")
