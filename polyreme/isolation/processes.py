"""The service's side of its worker processes, which a keeper starts and ends.

Invariant: every worker that `spawn` returns has loaded the same as the first one. `close` leaves no process and no file.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from polyreme.errors import ConfigError, UnavailableError
from polyreme.isolation.privacy import scrubbed
from polyreme.isolation.wire import HEADER, encode
from polyreme.process.temp_root import temp_root

logger = logging.getLogger(__name__)

_SOCKET_ROOM = len("polyreme-reward-XXXXXXXX/1000000/pymp-XXXXXXXX/listener-XXXXXXXX")
"""For the sockets of Python's multiprocessing in a reward's own temporary directory."""

_REPLY_BYTES = 8 << 20  # one number for each of some hundred thousand tokens
_STOP_SECONDS = 5.0
KEEPER_SECONDS = 5.0
"""Maximum seconds for the keeper to fork. A healthy keeper is never busy; one that got SIGSTOP does not answer at all."""


INVALID_MESSAGE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What reading a message raises whose form or numbers are wrong: untrusted code can write to its worker's socket."""


_WITH_KEEPER = "ended with its keeper"


class WorkerExitedError(Exception):
    """The worker's process has ended. The message states how."""

    @property
    def killed(self) -> bool:
        """Whether by SIGKILL or with its keeper: from outside, or by the kernel, rather than by what it ran."""
        return str(self) in ("was killed by SIGKILL", _WITH_KEEPER)


class Worker:
    """The service's side of one worker process."""

    def __init__(self, name: int, sock: socket.socket) -> None:
        self.name, self._sock = name, sock
        self.ended: str | None = None
        self.forked = asyncio.Event()
        self.fresh = True
        self.marked = False  # an item left threads or processes behind
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock, limit=1 << 20)

    async def send(self, message: object) -> None:
        with suppress(ConnectionError):  # `receive` reports it
            self._writer.write(encode(message))
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message. Raises WorkerExitedError when the worker has ended, and ValueError for an invalid message."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > _REPLY_BYTES:
                raise ValueError(f"expected a frame of at most {_REPLY_BYTES} bytes; found {size}")
            return json.loads(await self._reader.readexactly(size))
        except RecursionError:
            raise ValueError("expected a reply; found JSON that is too deeply nested") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            for _ in range(100):  # the keeper reports the reason on another socket
                if self.ended is not None:
                    break
                await asyncio.sleep(0.01)
            raise WorkerExitedError(self.ended or "closed its connection") from None

    def end(self, reason: str) -> None:
        """Marks the process as ended. Messages that it sent can still be read, even while another process holds the other end."""
        self.ended = reason
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        else:
            self._sock.close()


class Workers:
    """Worker processes with the same setup, and the keeper that owns them.

    Args:
        module: the module whose `main(socket)` is a worker.
        kind: the section of the configuration, for messages: "reward", whose workers load rewards.
        setup: the first message to every worker.
        preload: trusted modules that the keeper imports once for all workers.
        start_timeout: seconds for a worker to load.
        environment: names of variables that workers get in addition to the usual ones.
        begin_loading: called when a worker begins to load. Returns what receives the fractions of weights that it reports.

    Attributes:
        last_error: why the last attempt to start a worker failed, or None.
        facts: version and description of each thing loaded, and whether it reads tokens, as reported by the first worker.
    """

    def __init__(
        self,
        module: str,
        kind: str,
        setup: Mapping[str, object],
        preload: Sequence[str],
        start_timeout: float,
        environment: Collection[str] = (),
        begin_loading: Callable[[], Callable[[float], None] | None] = lambda: None,
    ) -> None:
        self._module, self._kind = module, kind
        self._setup, self._preload, self._start_timeout = setup, preload, start_timeout
        self._environment, self._begin_loading = environment, begin_loading
        self.last_error: str | None = None
        self._keeper_answers = False
        self._alive: dict[int, Worker] = {}
        self._names = 0
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        self.facts: list[tuple[str, str, bool]] = []

    async def spawn_all(self, count: int) -> list[Worker]:
        """Starts `count` workers, at least one: the first alone, so code that does not load is one error. Raises as `spawn`."""
        first = await self.spawn()
        return [first, *await asyncio.gather(*(self.spawn() for _ in range(count - 1)))]

    async def spawn(self) -> Worker:
        """Starts a worker and waits until it has loaded.

        Raises:
            ConfigError: the code cannot be loaded.
            UnavailableError: loading takes longer than `start_timeout`.
        """
        worker = await self._fork()
        try:
            await worker.open()
            await worker.send(self._setup)
            loaded = self._begin_loading()
            async with asyncio.timeout(self._start_timeout):
                while "loading" in (message := await worker.receive()):
                    if loaded is not None:
                        loaded(float(message["loading"]))
            facts = [(str(version), str(description), bool(tokens)) for version, description, tokens in message.get("ready", ())]
        except TimeoutError:
            self.discard(worker)
            raise UnavailableError(
                f"{self._kind}s that load within {self._start_timeout:g} s", "no answer", f"Raise {self._kind}.start_timeout."
            ) from None
        except WorkerExitedError as gone:
            self.discard(worker)
            raise ConfigError(f"{self._kind}s that load", f"their process {gone}", "Fix the code that runs at import.") from None
        except INVALID_MESSAGE as error:
            self.discard(worker)
            raise ConfigError(
                f"{self._kind}s that load", f"an invalid message ({error})", "Fix the code that runs at import."
            ) from None
        except BaseException:
            self.discard(worker)
            raise
        if "failed" in message:
            self.discard(worker)
            raise ConfigError(*message["failed"])
        if self.facts and facts != self.facts:
            self.discard(worker)
            raise ConfigError(
                f"the same {self._kind}s as at start ({self.facts})", str(facts), f"Restart the {self._kind} service."
            )
        self.facts, self.last_error = facts, None
        return worker

    async def _fork(self) -> Worker:
        """Forks a worker's process. A keeper that does not fork in time is killed with all its workers and replaced once."""
        for _ in range(2):
            if self._control is None:
                self._start_keeper()
            keeper = self._control
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._names += 1
            worker = self._alive[self._names] = Worker(self._names, ours)
            try:
                with theirs:
                    self._tell({"spawn": worker.name}, [theirs.fileno()])
                async with asyncio.timeout(KEEPER_SECONDS if self._keeper_answers else self._start_timeout):
                    await worker.forked.wait()
                if self._control is keeper:
                    return worker
                self.discard(worker)  # another spawn has replaced the keeper
            except (TimeoutError, BlockingIOError):
                self.last_error = "the worker keeper does not answer"
                self.discard(worker)
                if self._control is keeper:
                    logger.error("the worker keeper does not answer; it is killed and restarted")
                    self._lose_keeper()
            except BaseException:
                self.discard(worker)
                raise
        raise UnavailableError(
            "a worker keeper that answers", "no answer", "Reduce the load of the machine, or give it more memory."
        )

    async def respawn(self, give_up: Callable[[str], None]) -> Worker:
        """Starts a replacement worker, with growing pauses between attempts. Calls `give_up` with the reason of each failure."""
        pause = 0.1
        while True:
            try:
                return await self.spawn()
            except (ConfigError, UnavailableError, OSError) as error:
                logger.error("a worker could not be replaced: %s", error)
                self.last_error = str(error)
                give_up(f"no worker could be started: {error}")
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)

    def discard(self, worker: Worker) -> None:
        """Ends the worker's process and forgets it."""
        with suppress(OSError):
            self._tell({"kill": worker.name})
        worker.close()
        self._alive.pop(worker.name, None)

    def close(self) -> None:
        """Ends all workers and the processes that they started."""
        self._stop_keeper()
        for worker in list(self._alive.values()):
            worker.close()
        self._alive.clear()

    def _tell(self, message: dict[str, object], fds: Sequence[int] = ()) -> None:
        if self._control is None:
            raise ConnectionError("the worker keeper has ended")
        socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))

    def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.mkdtemp(prefix=f"polyreme-{self._kind}-", dir=temp_root(_SOCKET_ROOM))
        with theirs:
            words = (str(theirs.fileno()), self._folder, self._module, *self._preload)
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "polyreme.isolation.keeper", *words],
                env=scrubbed(os.environ, self._environment),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control, self._keeper_answers = ours, False
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _hear(self) -> None:
        """Handles a message from the keeper. When the keeper ends, all workers end."""
        if self._control is None:
            return
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._keeper_answers = True
            message = json.loads(data)
            if (worker := self._alive.get(message.get("forked") or message["exited"])) is not None:
                worker.forked.set()
                if "exited" in message:
                    worker.end(message["reason"])
            return
        logger.error("the worker keeper ended; it is restarted with the next worker")
        self._lose_keeper()

    def _lose_keeper(self) -> None:
        """Kills the keeper, and with it all workers."""
        if self._keeper is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._keeper.pid, signal.SIGKILL)
        self._stop_keeper()
        for worker in self._alive.values():
            worker.forked.set()
            worker.end(_WITH_KEEPER)

    def _stop_keeper(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._keeper is not None:
            try:
                self._keeper.wait(_STOP_SECONDS)  # it kills its workers within milliseconds after the socket closes
            except subprocess.TimeoutExpired:
                os.killpg(self._keeper.pid, signal.SIGKILL)
                self._keeper.wait()
            self._keeper = None
            shutil.rmtree(self._folder, ignore_errors=True)  # a no-op unless the keeper was killed
