"""The workers as one pool. Invariants: every item gets an outcome by its deadline, whatever a plugin does; an item is blamed only
for what it does to a worker that nothing else has marked.

Items go to a worker in small batches and are answered one by one. When a worker falls silent past an item's deadline it is killed:
that item is TIMEOUT, those behind it go back to the queue. When a worker dies, the item under way is asked once more, alone, on a
fresh worker, unless the worker was fresh: what killed it may have been left there by an earlier item.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from polyreme.errors import ConfigError, UnavailableError
from polyreme_reward.isolation.wire import HEADER, encode
from polyreme_reward.items import Item, Outcome, Status, failed
from polyreme_reward.metrics import Metrics

log = logging.getLogger(__name__)

_CHUNK = 8  # few enough that good items do not wait long behind one that hangs
_CHUNK_CHARS = 1 << 20
_REPLY_BYTES = 1 << 20
_STOP_SECONDS = 5.0


class _Gone(Exception):
    """The worker's process has ended; the message says how."""


class _Job:
    """An item on its way to an outcome."""

    __slots__ = ("answer", "chars", "fields", "index", "suspect")

    def __init__(self, index: int, item: Item, answer: "asyncio.Future[Outcome]") -> None:
        self.index, self.fields, self.answer = index, tuple(item), answer
        self.chars = sum(map(len, item))
        self.suspect = False  # it was under way when a used worker failed: next time it goes alone, to a fresh one


class _Worker:
    """The service's end of one worker process."""

    def __init__(self, name: int, sock: socket.socket) -> None:
        self.name, self._sock = name, sock
        self.ended: str | None = None
        self.fresh = True
        self.marked = False  # an item left threads or processes in it
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock, limit=1 << 20)

    async def send(self, message: Any) -> None:
        with suppress(ConnectionError):  # its end is told by receive
            self._writer.write(encode(message))
            await self._writer.drain()

    async def receive(self) -> Any:
        """The next message. Raises _Gone at the worker's end and ValueError for what is no message."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > _REPLY_BYTES:
                raise ValueError(f"expected a frame of at most {_REPLY_BYTES} bytes; found {size}")
            return json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            for _ in range(100):  # the keeper's word on how it ended comes by another way
                if self.ended is not None:
                    break
                await asyncio.sleep(0.01)
            raise _Gone(self.ended or "closed its connection") from None

    def end(self, reason: str) -> None:
        """Its process is gone: what it sent can still be read, then comes the end, whoever else holds the other socket."""
        self.ended = reason
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        else:
            self._sock.close()


class WorkerPool:
    """Worker processes that all have the same rewards loaded.

    Args:
        sources: one per reward, as `plugins.load` takes them.
        preload: modules that the keeper imports once for all workers; trusted ones only.
        size: processes.
        item_timeout: seconds for one item.
        start_timeout: seconds for a worker to load every reward.
        memory_mib: data limit of a worker (RLIMIT_DATA).
        metrics: counts replaced workers.
    """

    def __init__(
        self,
        sources: Sequence[dict[str, Any]],
        preload: Sequence[str],
        size: int,
        item_timeout: float,
        start_timeout: float,
        memory_mib: int,
        metrics: Metrics,
    ) -> None:
        self._setup = {"rewards": list(sources), "memory_mib": memory_mib}
        self._preload, self._size = preload, size
        self._item_timeout, self._start_timeout = item_timeout, start_timeout
        self._metrics = metrics
        self._queue: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._workers: dict[int, _Worker] = {}
        self._names = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder = ""
        self.facts: list[tuple[str, str]] = []

    async def start(self) -> None:
        """Starts the keeper and the workers. Raises ConfigError when a reward cannot be loaded; UnavailableError when it is too slow."""
        try:
            first = [await self._spawn()]
            first += await asyncio.gather(*(self._spawn() for _ in range(self._size - 1)))
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in first]

    async def score(self, index: int, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes of the items under reward `index`, in their order."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(index, item, loop.create_future()) for item in items]
        self._queue.extend(jobs)
        self._work.set()
        return [await job.answer for job in jobs]

    async def close(self) -> None:
        """Ends every worker and whatever they started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in self._queue:
            job.answer.cancel()
        self._stop_keeper()
        for worker in list(self._workers.values()):
            worker.close()
        self._workers.clear()

    async def _serve(self, worker: _Worker | None) -> None:
        """One place in the pool: keeps a worker in it and feeds it."""
        while True:
            jobs = await self._take() if worker is not None else []
            try:
                if worker is not None and (worker.ended or (jobs[0].suspect and not worker.fresh)):
                    self._discard(worker)
                    worker = None
                if worker is None:
                    worker = await self._replace(jobs)
                if jobs and not await self._run(worker, jobs):
                    self._discard(worker)
                    worker = None
            except BaseException:
                for job in jobs:
                    job.answer.cancel()
                raise

    async def _take(self) -> list[_Job]:
        """The next jobs: a fair share of the queue, bounded in number and characters; a suspect alone."""
        while not self._queue:
            self._work.clear()
            await self._work.wait()
        jobs = [self._queue.popleft()]
        count = max(1, min(_CHUNK, len(self._queue) // self._size))
        chars = jobs[0].chars
        while not jobs[0].suspect and len(jobs) < count and not self._queue[0].suspect and chars < _CHUNK_CHARS:
            chars += self._queue[0].chars
            jobs.append(self._queue.popleft())
        return jobs

    async def _run(self, worker: _Worker, jobs: list[_Job]) -> bool:
        """Has the jobs scored. False when the worker must be replaced; jobs it did not answer are back in the queue."""
        await worker.send([[job.index, job.fields] for job in jobs])
        waiting = deque(jobs)
        while waiting:
            job = waiting[0]
            first, worker.fresh = worker.fresh, False
            retire = False
            try:
                async with asyncio.timeout(self._item_timeout):
                    outcome, retire, marked = _reply(await worker.receive())
                worker.marked |= marked
                doubt = retire and outcome.status is not Status.OK
            except TimeoutError:
                outcome = failed(
                    Status.TIMEOUT, f"expected an answer within {self._item_timeout:g} s; found none, the worker was ended"
                )
                retire, doubt = True, worker.marked
                self._metrics.workers_replaced.labels("timeout").inc()
            except _Gone as gone:
                outcome = failed(Status.ERROR, f"the worker process {gone}")
                retire, doubt = True, True
                self._metrics.workers_replaced.labels("exit").inc()
            except (ValueError, TypeError) as error:
                outcome = failed(Status.INVALID, f"the worker's reply is no reply: {error}")
                retire, doubt = True, False
            waiting.popleft()
            if doubt and not first:
                job.suspect = True
                waiting.appendleft(job)
            elif not job.answer.done():
                job.answer.set_result(outcome)
            if retire:
                self._give_back(waiting)
                return False
        return True

    def _give_back(self, jobs: Sequence[_Job]) -> None:
        self._queue.extendleft(reversed(jobs))
        self._work.set()

    async def _replace(self, jobs: list[_Job]) -> _Worker:
        """A new worker, with growing pauses while it does not come up; meanwhile `jobs` and the queue fail with the reason."""
        pause = 0.1
        while True:
            try:
                return await self._spawn()
            except (ConfigError, UnavailableError, OSError) as error:
                log.error("a worker could not be replaced: %s", error)
                self._queue.extend(jobs)
                jobs.clear()
                while self._queue:
                    job = self._queue.popleft()
                    if not job.answer.done():
                        job.answer.set_result(failed(Status.ERROR, f"no worker could be started: {error}"))
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)

    async def _spawn(self) -> _Worker:
        """A worker with every reward loaded."""
        if self._control is None:
            self._start_keeper()
        ours, theirs = socket.socketpair()
        self._names += 1
        worker = _Worker(self._names, ours)
        self._workers[worker.name] = worker
        ours.setblocking(False)
        try:
            with theirs:
                self._tell({"spawn": worker.name}, [theirs.fileno()])
            await worker.open()
            await worker.send(self._setup)
            async with asyncio.timeout(self._start_timeout):
                message = await worker.receive()
        except TimeoutError:
            self._discard(worker)
            raise UnavailableError(
                f"rewards that load within {self._start_timeout:g} s", "none", "Raise reward.start_timeout."
            ) from None
        except _Gone as gone:
            self._discard(worker)
            raise ConfigError("rewards that load", f"their process {gone}", "Mend what they do when imported.") from None
        except BaseException:
            self._discard(worker)
            raise
        if "failed" in message:
            self._discard(worker)
            raise ConfigError(*message["failed"])
        facts = [(str(version), str(description)) for version, description in message["ready"]]
        if self.facts and facts != self.facts:
            self._discard(worker)
            raise ConfigError(f"the same rewards as at start ({self.facts})", str(facts), "Restart the reward service.")
        self.facts = facts
        return worker

    def _discard(self, worker: _Worker) -> None:
        with suppress(OSError):
            self._tell({"kill": worker.name})
        worker.close()
        self._workers.pop(worker.name, None)

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._control is None:
            raise ConnectionError("the worker keeper has ended")
        socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))

    def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.mkdtemp(prefix="polyreme-reward-")
        with theirs:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "polyreme_reward.isolation.keeper", str(theirs.fileno()), self._folder, *self._preload],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _hear(self) -> None:
        """A worker's end, told by the keeper; or the keeper's own end, which is the end of all workers."""
        if self._control is None:
            return
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            message = json.loads(data)
            if (worker := self._workers.get(message["exited"])) is not None:
                worker.end(message["reason"])
            return
        log.error("the worker keeper ended; it is started again with the next worker")
        self._stop_keeper()
        for worker in self._workers.values():
            worker.end("ended with its keeper")

    def _stop_keeper(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._keeper is not None:
            try:
                self._keeper.wait(_STOP_SECONDS)  # it kills its workers when the socket closes: milliseconds
            except subprocess.TimeoutExpired:
                os.killpg(self._keeper.pid, signal.SIGKILL)
                self._keeper.wait()
            self._keeper = None
            shutil.rmtree(self._folder, ignore_errors=True)  # it has done this, unless it was killed


def _reply(message: Any) -> tuple[Outcome, bool, bool]:
    """A worker's reply: the outcome, whether the worker must go, whether it is marked."""
    status, value, text, extras, retire, marked, output = message
    if output:
        log.info("a reward printed: %s", output)
    if not math.isfinite(value):
        raise ValueError(f"expected a finite value; found {value}")
    outcome = Outcome(Status(status), float(value), str(text), {str(name): float(number) for name, number in extras.items()})
    return outcome, bool(retire), bool(marked)


class PooledReward:
    """A reward that runs in the pool's workers."""

    def __init__(self, name: str, weight: float, pool: WorkerPool, index: int) -> None:
        self.name, self.weight = name, weight
        self._pool, self._index = pool, index

    @property
    def version(self) -> str:
        return self._pool.facts[self._index][0]

    @property
    def description(self) -> str:
        return self._pool.facts[self._index][1]

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        return await self._pool.score(self._index, items)
