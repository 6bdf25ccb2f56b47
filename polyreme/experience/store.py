"""A client of a run's Redis, which checks the server's settings.

Invariant: a command returns its result or raises StoreError. A client retries through a restart, a pause or a failover of Redis, within a
time limit and with jitter. Acknowledged writes are on disk (`appendfsync always`), and nothing is evicted. What a script has changed is also with
`min-replicas-to-write` replicas when its call returns, so a failover to the one with the most data keeps it.
"""

import asyncio
import logging
import os
import socket
import time

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from polyreme.errors import StoreError
from polyreme.net.ports import join
from polyreme.net.redis_url import PASSWORD, split
from polyreme.process.backoff import Backoff

logger = logging.getLogger(__name__)

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.InvalidResponse)
_TRANSIENT = frozenset({"BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED"})
"""Codes of transient refusals. The command has changed nothing."""
REQUIRED_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings with which Redis loses no acknowledged write."""
_REPLICAS = "min-replicas-to-write"
_SERVER_FLAGS = " ".join(f"--{name} {value}" for name, value in REQUIRED_SETTINGS.items())

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
"""Commands of a client that have no answer yet, each on its own connection. Beyond 100 connections the client itself refuses commands."""
_REMINDER_INTERVAL = 10.0
_RETRY = Backoff(first=0.02, longest=2.0)


class RefusedError(StoreError):
    """Redis answered a command with an error. This includes errors of our scripts; `Scripts` recognizes them by their code.

    Attributes:
        code, detail: the first word of the reply, and the rest.
    """

    def __init__(self, error: exceptions.ResponseError) -> None:
        # The client removes a known code from the text.
        first, _, rest = str(error).partition(" ")
        self.code, self.detail = (error.status_code, str(error)) if error.status_code else (first, rest)
        super().__init__(*_refusal(self.code, f"{self.code} {self.detail}"))


def _refusal(code: str, reply: str) -> tuple[str, str, str]:
    """Expected, found and do, for an error reply."""
    match code:
        case "OOM":
            return (
                "free memory in Redis for the experience log",
                "Redis at its `maxmemory`",
                "Raise maxmemory, or lower trainer.save_interval, so that groups are released sooner. Nothing was lost.",
            )
        case "READONLY" | "MISCONF":
            return "a Redis that accepts writes", reply, "Use the primary, not a replica, and check that its disk has room."
        case "NOPERM":
            return (
                "a Redis user with the permissions of a run",
                reply,
                "Grant this user read, write and scripting on polyreme:*.",
            )
    return "a Redis that executes commands", reply, "Check its log, and its replicas if it has any."


class Store(Redis):
    """A Redis client that retries a command after a lost answer or a transient refusal, for `reconnect_timeout` seconds.

    Commands are therefore sent at least once. Every change of a run is an idempotent script.

    Attributes:
        replicas: number of Redis's replicas that have what a script has changed before its call returns; 0: it waits for none.
        room: of the commands that are sent at once; others wait in order.
        is_closed: it has been closed, so a command that fails is not sent again: its connection would stay open.
    """

    reconnect_timeout = RECONNECT_TIMEOUT
    replicas = 0
    room: asyncio.Semaphore
    is_closed = False

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes all connections. Commands that have no answer yet fail."""
        self.is_closed = True
        await super().aclose(close_connection_pool)

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
                        # wait_for of Python 3.11, which the client uses, loses a cancellation that arrives as it completes or fails.
                        raise asyncio.CancelledError
            except exceptions.NoScriptError:
                raise
            except (*_LOST, exceptions.InvalidResponse, exceptions.ResponseError) as error:
                failure = store_error(self, error)
                final = failure.code not in _TRANSIENT if isinstance(failure, RefusedError) else isinstance(error, _REFUSED)
                now = time.monotonic()
                left = (
                    began + (LOADING_TIMEOUT if isinstance(error, exceptions.BusyLoadingError) else self.reconnect_timeout) - now
                )
                if final or left <= 0 or self.is_closed:
                    raise failure from error
                if now >= next_reminder:
                    logger.warning("redis at %s: %s; retrying for another %.0f s", address(self), _cause(error), left)
                    next_reminder = now + _REMINDER_INTERVAL
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


async def connect(url: str, reconnect_timeout: float | None = None) -> Store:
    """A client of the Redis at `url` (redis://, rediss:// or unix://), after a check that it persists every write.

    A URL without a password uses the environment variable PASSWORD; commands move passwords there: see `redis_url`.

    The client belongs to the running event loop. Close it with `aclose()`.

    Args:
        reconnect_timeout: budget of the first connection in seconds; None: FIRST_CONNECT_TIMEOUT. A process whose Redis is
            known to exist passes RECONNECT_TIMEOUT.

    Raises:
        StoreError: no Redis answers, it refuses the connection, or its settings could lose experience.
    """
    split(url)
    try:
        client: Store = Store.from_url(  # type: ignore[assignment]
            url,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=SOCKET_TIMEOUT,
            password=os.environ.get(PASSWORD) or None,  # a password in the URL takes precedence
            retry=Retry(NoBackoff(), 0),  # execute_command retries; nested retries would multiply
        )
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


async def _check(client: Store) -> None:
    where = address(client)
    try:
        server = await client.info("server")
        found = {name: str(value) for name, value in (await client.config_get(*REQUIRED_SETTINGS, _REPLICAS)).items()}
    except RefusedError as error:
        raise StoreError(
            f"to read the settings of {where}",
            error.found,
            "Allow the user of this URL the commands INFO and CONFIG GET. Polyreme checks that no write can be lost.",
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
            f"Start it with `redis-server {_SERVER_FLAGS}`, or change it in place with "
            + "; ".join(f"`config set {name} {REQUIRED_SETTINGS[name]}`" for name in wrong)
            + " and `config rewrite`. Without a URL Polyreme starts its own Redis.",
        )


def address(client: Redis) -> str:
    """The address of a client's server, without its password."""
    kwargs = client.connection_pool.connection_kwargs
    return kwargs.get("path") or join(kwargs.get("host", "localhost"), kwargs.get("port", 6379))


def store_error(client: Redis, error: Exception) -> StoreError:
    """The StoreError of a failed command."""
    if isinstance(error, exceptions.ResponseError):
        return RefusedError(error)
    where = address(client)
    if isinstance(error, exceptions.BusyLoadingError):
        return StoreError(
            f"Redis at {where} to answer", "it is loading its data", "Wait until it has finished, then start again."
        )
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return StoreError(
            f"Redis at {where} to accept the login",
            str(error),
            f"Set {PASSWORD}. The URL names any user other than the default one: redis://user@host:port/0.",
        )
    if isinstance(error, exceptions.InvalidResponse):
        return StoreError(f"a Redis at {where}", "a server that speaks another protocol", "Check host and port of the URL.")
    return StoreError(
        f"a Redis that answers at {where}",
        _cause(error),
        "Check the URL, and that Redis runs there and is reachable "
        f"(`redis-server {_SERVER_FLAGS}` starts one). Without a URL Polyreme starts its own Redis.",
    )


def _cause(error: BaseException | None) -> str:
    """The root cause, which redis-py wraps in several layers."""
    first = error
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return "connection refused (nothing listens there)"
        if isinstance(error, socket.gaierror):
            return "no host of that name"
        if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
            return f"no answer within {SOCKET_TIMEOUT:g} s"
        error = error.__cause__ or error.__context__
    return str(first)
