"""A reward model in its own process.

Invariant: every item gets an outcome, whatever happens to the process. At most _WINDOW items are in the process, and a batch may
combine items of several callers.

The process reports which items it is scoring. When it misses an item's deadline it is killed, and those items are retried one at
a time: an item that fails alone is the cause. The same happens when the process dies. A model that can no longer score does not
become available again, since loading includes a first score.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from polyreme.errors import ConfigError
from polyreme.experience.loading import LoadReports, unreported
from polyreme.isolation.processes import INVALID_MESSAGE, Worker, WorkerExitedError, Workers
from polyreme.process.tasks import end_all, running
from polyreme_reward.items import Item, Outcome, Status, failed, outcome_of
from polyreme_reward.metrics import RewardMetrics

logger = logging.getLogger(__name__)

_WORKER = "polyreme_reward.model.worker"
_PRELOAD = ("torch", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto")
_WINDOW = 1024  # maximum number of items in the process, from which it chooses its batches
_FRAME = 64
_FRAME_CHARS = 1 << 20


@checked(frozen=True, config={"extra": "forbid"})
class ModelOptions:
    """The `options` of a reward model.

    Args:
        device: cpu, cuda or npu, with a number to select one of several (cuda:1).
        dtype: data type of weights and computation.
        threads: compute threads on CPU.
        batch_tokens: maximum padded tokens per batch. A longer text is a batch of its own.
        template: chat: apply the model's chat template to prompt and response. none: use both as the policy saw them.
        prompt_column: for chat, the row's column with the prompt (text or messages). null: the prompt of the request.
        max_length: maximum tokens of prompt and response; a longer item is an ERROR. null: the model's limit.
        label: index of the output that is the score, for a model with several outputs.
    """

    device: Annotated[str, Field(pattern=r"^(cpu|(cuda|npu)(:\d+)?)$")] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Annotated[int, Field(ge=1)] = 1
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    template: Literal["chat", "none"] = "chat"
    prompt_column: str | None = "prompt"
    max_length: Annotated[int, Field(ge=1)] | None = None
    label: Annotated[int, Field(ge=0)] | None = None


class _Job:
    """An item that waits for its outcome."""

    __slots__ = ("alone", "answer", "chars", "fields", "number")

    def __init__(self, number: int, item: Item, answer: "asyncio.Future[Outcome]") -> None:
        self.number, self.fields, self.answer = number, tuple(item), answer
        self.chars = item.size
        self.alone = False  # a process failed while scoring it

    def end(self, outcome: Outcome) -> None:
        if not self.answer.done():
            self.answer.set_result(outcome)


class ModelReward:
    """A sequence classifier as a reward.

    Args:
        name: name of the reward.
        weight: weight of the reward in a score.
        path: the model's directory.
        options: the fields of ModelOptions.
        item_timeout: seconds per batch, and therefore per item.
        start_timeout: seconds to load the model.
        memory_mib: data memory for scoring in addition to the loaded model, in MiB.
        metrics: counts replaced processes.
        loads: reports how much of the model is loaded, at start and when its process is replaced.

    Raises:
        ConfigError: an option is unknown or invalid, or the directory does not exist.
    """

    correctness = False

    def __init__(
        self,
        name: str,
        weight: float,
        path: Path,
        options: Mapping[str, object],
        item_timeout: float,
        start_timeout: float,
        memory_mib: int,
        metrics: RewardMetrics,
        loads: LoadReports = unreported,
    ) -> None:
        try:
            checked_options = TypeAdapter(ModelOptions).validate_python(options)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            known = ", ".join(ModelOptions.__dataclass_fields__)
            raise ConfigError(f"options of a reward model ({known})", problems, "Fix reward.rewards.") from None
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"a Hugging Face model directory {path}", "no config.json in it", "Fix `model`. Models are not downloaded."
            )
        self.name, self.weight = name, weight
        self._item_timeout, self._metrics = item_timeout, metrics
        setup = {"module": _WORKER, "model": str(path), "options": asdict(checked_options), "memory_mib": memory_mib}
        self._processes = Workers(
            "polyreme_reward.isolation.worker",
            "reward",
            setup,
            _PRELOAD,
            start_timeout,
            begin_loading=lambda: loads(f"reward model {name}"),
        )
        self._numbers = itertools.count()
        self._queue: deque[_Job] = deque()
        self._inside: dict[int, _Job] = {}  # sent to the process and not yet answered
        self._under_way: list[int] = []
        self._wake = asyncio.Event()
        self._deadline: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    version: str
    description: str
    reads_tokens = False

    @property
    def available(self) -> bool:
        return self._processes.last_error is None

    async def start(self) -> None:
        """Loads the model.

        Raises:
            ConfigError: the model cannot be loaded.
            UnavailableError: loading takes longer than `start_timeout`.
        """
        try:
            worker = await self._processes.spawn()
        except BaseException:
            self._processes.close()
            raise
        self.version, self.description, _ = self._processes.facts[0]
        self._task = asyncio.create_task(self._serve(worker))

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        jobs = [_Job(next(self._numbers), item, loop.create_future()) for item in items]
        self._queue.extend(jobs)
        self._wake.set()
        return [await job.answer for job in jobs]

    async def close(self) -> None:
        """Ends the model's process."""
        if self._task is not None:
            await end_all([self._task])
        for job in [*self._queue, *self._inside.values()]:
            job.answer.cancel()
        self._processes.close()

    async def _serve(self, worker: Worker) -> None:
        while True:
            async with running(self._feed(worker)):
                failure = await self._hear(worker)
            logger.warning("reloading the reward model %s: %s", self.name, failure.message)
            self._processes.discard(worker)
            self._blame(failure)
            worker = await self._processes.respawn(self._give_up)

    async def _feed(self, worker: Worker) -> None:
        """Sends queued jobs while the window has room."""
        while True:
            while not (jobs := self._take()):
                self._wake.clear()
                await self._wake.wait()
            if not self._inside and self._deadline is not None:
                self._deadline.reschedule(asyncio.get_running_loop().time() + self._item_timeout)
            self._inside |= {job.number: job for job in jobs}
            await worker.send([[job.number, job.fields] for job in jobs])

    def _take(self) -> list[_Job]:
        """Takes the next frame of jobs, bounded in number and characters. Takes a suspect only when the process is empty."""
        alone = bool(self._queue) and self._queue[0].alone
        if alone or any(job.alone for job in self._inside.values()):
            return [self._queue.popleft()] if alone and not self._inside else []
        jobs: list[_Job] = []
        chars = 0
        room = min(_FRAME, _WINDOW - len(self._inside))
        while self._queue and not self._queue[0].alone and len(jobs) < room and chars < _FRAME_CHARS:
            jobs.append(self._queue.popleft())
            chars += jobs[-1].chars
        return jobs

    async def _hear(self, worker: Worker) -> Outcome:
        """Receives answers until the process fails. Returns the outcome for the items that it was scoring."""
        while True:
            try:
                async with asyncio.timeout(self._item_timeout if self._inside else None) as self._deadline:
                    message = await worker.receive()
                if "broken" in message:
                    self._metrics.workers_replaced.labels("exit").inc()
                    return failed(Status.ERROR, f"the model's process failed: {message['broken']}")
                self._answer(message["done"])
                self._under_way = list(message["begin"])
            except TimeoutError:
                self._metrics.workers_replaced.labels("timeout").inc()
                return failed(
                    Status.TIMEOUT,
                    f"expected a score within {self._item_timeout:g} s; found none, so the model's process was killed. "
                    "Lower options.batch_tokens, or raise reward.item_timeout",
                )
            except WorkerExitedError as gone:
                self._metrics.workers_replaced.labels("exit").inc()
                return failed(Status.ERROR, f"the model's process {gone}")
            except INVALID_MESSAGE as error:
                self._metrics.workers_replaced.labels("exit").inc()
                return failed(Status.INVALID, f"expected a valid answer from the model's process; found {error}")

    def _answer(self, done: Iterable[tuple[int, int, float, str]]) -> None:
        for number, status, value, text in done:
            outcome = outcome_of(value) if status == Status.OK else failed(Status(status), str(text))
            self._inside.pop(number).end(outcome)
        self._wake.set()

    def _blame(self, failure: Outcome) -> None:
        """Handles a failed process's items. A possible cause is retried alone or gets its outcome. The others are requeued."""
        inside, self._inside = self._inside, {}
        blamed = [inside.pop(number) for number in self._under_way if number in inside]
        if not blamed and inside:  # the process had not reported any
            blamed, inside = list(inside.values()), {}
        self._under_way = []
        for job in blamed:
            if job.alone or (failure.status is Status.TIMEOUT and len(blamed) == 1):
                job.end(failure)
            else:
                job.alone = True
                self._queue.append(job)
        self._queue.extendleft(reversed(inside.values()))

    def _give_up(self, reason: str) -> None:
        while self._queue:
            self._queue.popleft().end(failed(Status.ERROR, reason))
