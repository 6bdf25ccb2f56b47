"""A client of a run's Redis, which checks the server's settings.

Invariant: a command returns its result or raises StoreError. A client retries through a restart, a pause or a failover of Redis,
within a time limit, with jitter. Acknowledged writes are on disk (`appendfsync always`), and nothing is evicted. What a script
changed is also with `min-replicas-to-write` replicas when its call returns, so a failover to the one with the most data keeps it.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from polyreme.errors import StoreError
from polyreme.experience.store_errors import REQUIRED_SETTINGS, SERVER_FLAGS, RefusedError, address, cause, is_final, store_error
from polyreme.net.redis_url import PASSWORD, SENTINEL_PASSWORD, watched
from polyreme.process.backoff import Backoff

logger = logging.getLogger(__name__)

Client = TypeVar("Client", bound=Redis)

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_TRANSIENT = frozenset({"BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNBLOCKED"})
"""Codes of transient refusals. The command has changed nothing."""
_REPLICAS = "min-replicas-to-write"

# All in seconds.
SOCKET_TIMEOUT = 5.0
"""Longest wait for data of a socket. Blocking reads use less."""
RECONNECT_TIMEOUT = 60.0
"""Reconnect budget after a lost connection."""
FIRST_CONNECT_TIMEOUT = 5.0
"""Budget of the first connection, where a wrong address is the likelier reason."""
LOADING_TIMEOUT = 300.0
"""Budget of a server that loads its data."""
REPLICA_TIMEOUT = 2.0
"""Wait of a script's call for replicas, before it repeats the script. Less than SOCKET_TIMEOUT."""
COMMANDS_AT_ONCE = 64
"""A client's unanswered commands, each on its own connection. Beyond 100 connections the client itself refuses commands."""
_REMINDER_INTERVAL = 10.0
_RETRY = Backoff(first=0.02, longest=2.0)


class Store(Redis):
    """A Redis client that retries a command after a lost answer or a transient refusal, for `reconnect_timeout` seconds.

    Commands are therefore sent at least once. Every change of a run is an idempotent script.

    Attributes:
        replicas: number of Redis's replicas that have what a script has changed before its call returns; 0: it waits for none.
        sentinels: the clients of the Sentinels that name the primary, if the URL does.
        room: of the commands that are sent at once; others wait in order.
        is_closed: it has been closed, so a command that fails is not sent again: its connection would stay open.
    """

    reconnect_timeout = RECONNECT_TIMEOUT
    replicas = 0
    room: asyncio.Semaphore
    sentinels: Sentinel | None = None
    is_closed = False

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes all connections. Commands that have no answer yet fail."""
        self.is_closed = True
        await super().aclose(close_connection_pool)
        if self.sentinels is not None:
            await self.sentinels.aclose()

    async def execute_command(self, *args: object, **options: object) -> object:
        """As in Redis.

        Raises:
            StoreError: the server is unreachable for `reconnect_timeout` seconds, or loads for LOADING_TIMEOUT.
            RefusedError: it replied with an error; with a transient one, for `reconnect_timeout` seconds.
            NoScriptError: it does not have the script; the caller loads it.
        """
        began = time.monotonic()
        attempts, next_reminder = 0, 0.0
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        while True:
            try:
                try:
                    async with self.room:
                        if self.replicas and args[0] == "EVALSHA":
                            return await self._replicated(*args, **options)
                        return await super().execute_command(*args, **options)
                finally:
                    if task and task.cancelling() > cancels:
                        # The client's wait_for, of Python 3.11, loses a cancellation that arrives as it completes or fails.
                        raise asyncio.CancelledError
            except exceptions.NoScriptError:
                raise
            except (*_LOST, exceptions.InvalidResponse, exceptions.ResponseError) as error:
                failure = store_error(self, error)
                final = failure.code not in _TRANSIENT if isinstance(failure, RefusedError) else is_final(error)
                now = time.monotonic()
                left = (
                    began + (LOADING_TIMEOUT if isinstance(error, exceptions.BusyLoadingError) else self.reconnect_timeout) - now
                )
                if final or left <= 0 or self.is_closed:
                    raise failure from error
                if now >= next_reminder:
                    logger.warning("redis at %s: %s; retrying for another %.0f s", address(self), cause(self, error), left)
                    next_reminder = now + _REMINDER_INTERVAL
                if isinstance(error, exceptions.ReadOnlyError):  # since a failover; its address may lead to the primary by now
                    await self.connection_pool.disconnect(inuse_connections=False)
                attempts += 1
                await asyncio.sleep(min(left, _RETRY.draw(attempts)))

    async def _replicated(self, *args: object, **options: object) -> object:
        """Executes a command, and waits on its connection until `replicas` have it. Raises NOREPLICAS, which is transient."""
        async with self.pipeline(transaction=False) as pipe:
            pipe.execute_command(*args, **options)
            pipe.execute_command("WAIT", self.replicas, int(1000 * REPLICA_TIMEOUT))
            answer, found = await pipe.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(found, Exception):
            raise found
        if found < self.replicas:
            raise exceptions.ResponseError(f"NOREPLICAS the change is with {found} of {self.replicas} replicas")
        return answer


async def connect(url: str, reconnect_timeout: float | None = None, socket_timeout: float = SOCKET_TIMEOUT) -> Store:
    """A client of the Redis at `url` (redis://, rediss:// or unix://), after a check that it persists every write.

    A URL without a password uses the environment variable PASSWORD; commands move passwords there: see `redis_url`. With the
    parameter `sentinel` the URL names Sentinels, which are asked for the primary at each new connection: see `redis_url.watched`.

    The client belongs to the running event loop. Close it with `aclose()`.

    Args:
        reconnect_timeout: budget of the first connection in seconds; None: FIRST_CONNECT_TIMEOUT. A process whose Redis is
            known to exist passes RECONNECT_TIMEOUT.
        socket_timeout: seconds for one answer, after which a command is repeated.

    Raises:
        StoreError: no Redis answers, it refuses the connection, or its settings could lose experience.
    """
    try:
        client = _client(url, socket_timeout)
    except ValueError as error:
        raise StoreError("a Redis URL such as redis://127.0.0.1:6379/0", str(error), "Fix the URL.") from None
    client.room = asyncio.Semaphore(COMMANDS_AT_ONCE)
    try:
        client.reconnect_timeout = FIRST_CONNECT_TIMEOUT if reconnect_timeout is None else reconnect_timeout
        await _check(client)
        client.reconnect_timeout = RECONNECT_TIMEOUT
        await client.ping()  # INFO and CONFIG answer during loading; PING waits for its end
    except BaseException:
        await client.aclose()
        raise
    return client


@asynccontextmanager
async def connected(url: str, reconnect_timeout: float | None = None) -> AsyncIterator[Store]:
    """A client until the block ends. Arguments and errors are those of `connect`."""
    client = await connect(url, reconnect_timeout)
    try:
        yield client
    finally:
        await client.aclose()


def _client(url: str, seconds: float) -> Store:
    """A client that has not connected yet. Raises ValueError for a wrong parameter of the URL."""
    place = watched(url)  # refuses an invalid URL
    _check_certificates(parse_url(place.url if place else url))
    if place is None:
        return _connection(Store, url, PASSWORD, seconds)
    sentinels = Sentinel([])
    sentinels.sentinels = [_connection(_SentinelClient, each, SENTINEL_PASSWORD, seconds) for each in place.sentinel_urls]
    options: dict[str, object] = {**_connection(Store, place.url, PASSWORD, seconds).connection_pool.connection_kwargs}
    has_tls = urlsplit(place.url).scheme == "rediss"
    client: Store = Store.from_pool(  # type: ignore[assignment]
        SentinelConnectionPool(place.name, sentinels, ssl=has_tls, **options)
    )
    client.sentinels = sentinels
    return client


def _connection(kind: type[Client], url: str, password: str, seconds: float) -> Client:
    """A client of a server. `password`: its password's environment variable, unless the URL has one. `seconds`: for an answer."""
    return kind.from_url(  # type: ignore[return-value]
        url,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        password=os.environ.get(password) or None,
        retry=Retry(NoBackoff(), 0),  # execute_command retries; nested retries would multiply
    )


class _SentinelClient(Redis):
    """Named by its address in redis-py's report of Sentinels that did not answer."""

    def __repr__(self) -> str:
        return address(self)


def _check_certificates(options: Mapping[str, object]) -> None:
    """Raises StoreError for a file of the URL that TLS cannot use: redis-py would name none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, load in (
        ("ssl_ca_certs", context.load_verify_locations),
        ("ssl_certfile", Path.read_bytes),
        ("ssl_keyfile", Path.read_bytes),
    ):
        if path := options.get(name):
            try:
                load(Path(str(path)))
            except OSError as error:
                raise StoreError(
                    f"a PEM file for {name} of the Redis URL",
                    f"{path}: {error.strerror}",
                    "Fix the path, or let this user read the file.",
                ) from None


async def _check(client: Store) -> None:
    where = address(client)
    try:
        server = await client.info("server")
        found = {name: str(value) for name, value in (await client.config_get(*REQUIRED_SETTINGS, _REPLICAS)).items()}
    except RefusedError as error:
        raise StoreError(
            f"to read the settings of {where}", error.found, f"Polyreme checks that no write can be lost. {error.do}"
        ) from None
    client.replicas = int(found.get(_REPLICAS, 0))
    version = str(server.get("redis_version", "0"))
    if int(version.split(".")[0]) < 7:
        raise StoreError(f"Redis 7 or newer (or Valkey) at {where}", f"version {version}", "Upgrade it.")
    wrong = {name: found.get(name, "nothing") for name, value in REQUIRED_SETTINGS.items() if found.get(name) != value}
    if wrong:
        raise StoreError(
            f"a Redis at {where} that persists every acknowledged write",
            ", ".join(f"{name} {value} (must be {REQUIRED_SETTINGS[name]})" for name, value in wrong.items()),
            f"Start it with `redis-server {SERVER_FLAGS}`, or change it in place with "
            + "; ".join(f"`config set {name} {REQUIRED_SETTINGS[name]}`" for name in wrong)
            + " and `config rewrite`. Without a URL Polyreme starts its own Redis.",
        )
