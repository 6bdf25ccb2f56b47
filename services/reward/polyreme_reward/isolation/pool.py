"""A pool of worker processes.

Invariant: every item gets an outcome by its deadline, whatever a plugin does. A failure is attributed to an item only if no other
item has used the worker before.

A worker receives items in small batches and answers one by one. A worker that misses an item's deadline is killed: that item is a
TIMEOUT, and the items after it return to the queue. When a worker dies, the current item is retried once, alone, on a fresh
worker, since an earlier item or an outside cause may have killed the first one.
"""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from polyreme.isolation.processes import INVALID_MESSAGE, Worker, WorkerExitedError, Workers
from polyreme.process.tasks import end_all
from polyreme_reward.items import Item, Outcome, Status, failed
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.plugins.load import Source

logger = logging.getLogger(__name__)

_CHUNK = 8  # small, so that other items do not wait long behind one that hangs
_CHUNK_CHARS = 1 << 20


class _Job:
    """An item that waits for its outcome."""

    __slots__ = ("answer", "chars", "fields", "index", "number", "suspect", "tokens")

    def __init__(self, number: int, index: int, item: Item, answer: "asyncio.Future[Outcome]") -> None:
        self.number, self.index, self.fields, self.answer = number, index, tuple(item), answer
        self.chars, self.tokens = item.size, len(item.token_ids)
        self.suspect = False  # a worker failed on it: the retry runs alone, on a fresh worker

    @property
    def shown(self) -> str:
        """What identifies the item in a message."""
        item = Item._make(self.fields)
        return (
            f"the item has the label {(item.label or '')[:100]!r} and a response of {len(item.response)} characters that ends"
            f" {item.response[-100:]!r}"
        )


class WorkerPool:
    """Worker processes that have loaded the same rewards.

    Args:
        sources: the source of each reward, in the form of `plugins.load`.
        preload: trusted modules that the keeper imports once for all workers.
        size: number of processes.
        item_timeout: seconds per item.
        start_timeout: seconds for a worker to load all rewards.
        memory_mib: data limit of a worker (RLIMIT_DATA), in MiB.
        environment: names of variables that workers get in addition to the usual ones.
        metrics: counts replaced workers.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        preload: Sequence[str],
        size: int,
        item_timeout: float,
        start_timeout: float,
        memory_mib: int,
        environment: Collection[str],
        metrics: RewardMetrics,
    ) -> None:
        setup = {"rewards": list(sources), "memory_mib": memory_mib}
        self._processes = Workers("polyreme_reward.isolation.worker", "reward", setup, preload, start_timeout, environment)
        self._size, self._item_timeout = size, item_timeout
        self._metrics = metrics
        self._numbers = itertools.count()
        self._queue: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def facts(self) -> list[tuple[str, str, bool]]:
        """Version and description of each reward, and whether it reads tokens."""
        return self._processes.facts

    @property
    def available(self) -> bool:
        """Whether the last attempt to start a worker succeeded."""
        return self._processes.last_error is None

    async def start(self) -> None:
        """Starts the keeper and the workers.

        Raises:
            ConfigError: a reward cannot be loaded.
            UnavailableError: loading takes longer than `start_timeout`.
        """
        try:
            first = await self._processes.spawn_all(self._size)
        except BaseException:
            await self.close()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in first]

    async def score(self, index: int, items: Sequence[Item]) -> list[Outcome]:
        """The outcomes of the items under reward number `index`, in order."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(next(self._numbers), index, item, loop.create_future()) for item in items]
        self._queue.extend(jobs)
        self._work.set()
        return [await job.answer for job in jobs]

    async def close(self) -> None:
        """Ends all workers and the processes that they started."""
        await end_all(self._tasks)
        for job in self._queue:
            job.answer.cancel()
        self._processes.close()

    async def _serve(self, worker: Worker | None) -> None:
        """Feeds one worker and replaces it when it is lost."""
        while True:
            jobs = await self._take() if worker is not None else []
            try:
                if worker is not None and (worker.ended or (jobs[0].suspect and not worker.fresh)):
                    self._processes.discard(worker)
                    worker = None
                if worker is None:
                    worker = await self._replace(jobs)
                if jobs and not await self._run(worker, jobs):
                    self._processes.discard(worker)
                    worker = None
            except BaseException:
                for job in jobs:
                    job.answer.cancel()
                raise

    async def _take(self) -> list[_Job]:
        """Takes the next jobs: a fair share of the queue, bounded in number and characters. A suspect is taken alone."""
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

    async def _run(self, worker: Worker, jobs: list[_Job]) -> bool:
        """Sends jobs and waits for their answers. Returns False if the worker must be replaced. Unanswered jobs are requeued."""
        await worker.send([[job.number, job.index, job.fields] for job in jobs])
        waiting = deque(jobs)
        while waiting:
            job = waiting[0]
            first, worker.fresh = worker.fresh, False
            retire = False
            try:
                async with asyncio.timeout(self._item_timeout):
                    outcome, retire, marked = _reply(job, await worker.receive())
                worker.marked |= marked
                doubt = retire and outcome.status is not Status.OK and not first
            except TimeoutError:
                outcome = failed(
                    Status.TIMEOUT,
                    f"expected an answer within {self._item_timeout:g} s; found none, so the worker was killed; {job.shown}",
                )
                retire, doubt = True, worker.marked and not first
                self._metrics.workers_replaced.labels("timeout").inc()
            except WorkerExitedError as gone:
                outcome = failed(Status.ERROR, f"the worker process {gone}")
                retire, doubt = True, not job.suspect
                self._metrics.workers_replaced.labels("exit").inc()
            except INVALID_MESSAGE as error:
                outcome = failed(Status.INVALID, f"the worker's reply is invalid: {error}")
                retire, doubt = True, not first  # an earlier item may have written it
            waiting.popleft()
            if doubt:
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

    async def _replace(self, jobs: list[_Job]) -> Worker:
        """Starts a new worker. When that fails, `jobs` and the queue fail with the reason."""

        def give_up(reason: str) -> None:
            self._queue.extend(jobs)
            jobs.clear()
            while self._queue:
                job = self._queue.popleft()
                if not job.answer.done():
                    job.answer.set_result(failed(Status.ERROR, reason))

        return await self._processes.respawn(give_up)


def _reply(job: _Job, message: Any) -> tuple[Outcome, bool, bool]:
    """A worker's reply to the job: the outcome, whether to replace the worker, and whether it is marked."""
    answered, status, value, text, extras, per_token, retire, marked, output = message
    if answered != job.number:
        raise ValueError(f"expected a reply to item {job.number}; found a reply to {str(answered)[:40]}")
    if output:
        logger.info("a reward printed: %s", output)
    if not math.isfinite(value):
        raise ValueError(f"expected a finite value; found {value}")
    numbers = tuple(map(float, per_token))
    if len(numbers) not in (0, job.tokens) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"expected {job.tokens} finite numbers, one per token; found {len(numbers)}")
    named = {str(name): float(number) for name, number in extras.items()}
    outcome = Outcome(Status(status), float(value), str(text), named, numbers)
    return outcome, bool(retire), bool(marked)


class PooledReward:
    """A reward that runs in the workers of a pool that has started."""

    def __init__(self, name: str, weight: float, pool: WorkerPool, index: int, correctness: bool) -> None:
        self.name, self.weight, self.correctness = name, weight, correctness
        self._pool, self._index = pool, index
        self.version, self.description, self.reads_tokens = pool.facts[index]

    @property
    def available(self) -> bool:
        return self._pool.available

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        return await self._pool.score(self._index, items)
