"""The observer of a training service: each model is a run directory, which the page shows.

Invariant: one process writes the run directories. A record is in its directory once: the newest line of metrics.jsonl says where
in the stream its directory stands, and a file of samples is complete before its record. An observer that is killed costs nothing.
A model's files of samples have a bound: the oldest ones are deleted.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from polyreme.experience.metric_records import Line, SamplesServed, StageDone, StageStep, read_record
from polyreme.experience.requests import RequestLog, Worker, tenant_in
from polyreme.experience.run import RunState
from polyreme.experience.service_records import ModelLine
from polyreme.rundir.input_files import read_model_files
from polyreme.rundir.reader.run import VOCABULARY
from polyreme.rundir.run_directory import NO_REDIS, RunFile, owned, read_run_file, write_run_file
from polyreme.rundir.run_records import read_records, write_atomically, write_summary
from polyreme.rundir.service_status import MODELS, SERVICE, ServiceState, WorkerState
from polyreme_trainer.observe.records import Recorder
from polyreme_trainer.observe.vocabulary import write_vocabulary
from polyreme_trainer.service.observer.busy import BusyTime

WORKERS: tuple[Worker, ...] = ("learner", "sampler")
MAX_OPEN = 64
"""Most run directories that are open at once."""
_BATCH = 1000
_WAIT_MS = 1000
_STATE_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
"""Between two batches of records: each has costs of its own, and the cores that it needs are those of the learner."""


@dataclass
class _ModelRun:
    """An open run directory, with what its summary counts."""

    recorder: Recorder
    files: ExitStack
    samples: deque[tuple[str, int]]
    """The files of samples, the oldest first, and their bytes."""
    next_group: int = 0
    trained_tokens: int = 0
    sampled_tokens: int = 0


class Observer:
    """Writes the run directories below `folder`/models and `folder`/service.json until `stop` is set.

    Args:
        log: the request log, with the service's records.
        model: the base model's directory; base_model: its name.
        names: of the tenants that have one.
    """

    samples_bytes = 256 << 20
    """Most bytes of a model's files of samples."""

    def __init__(self, log: RequestLog, folder: Path, model: Path, base_model: str, names: Mapping[str, str]) -> None:
        self._log, self._records, self._folder = log, log.records, folder
        self._model, self._base_model, self._names = model, base_model, names
        self._open: dict[str, _ModelRun] = {}
        self._busy = BusyTime()
        self.state = ServiceState(base_model, 0.0, {})
        self.counts: dict[str, dict[str, float]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Raises StoreError when Redis is lost, OSError for a full disk."""
        write_vocabulary(self._folder, read_model_files(self._model))
        cursor = "0"
        try:
            while not stop.is_set():
                lines = await self._records.read(cursor, _BATCH, _WAIT_MS)
                for model in dict.fromkeys(line.model for line in lines):
                    await self._take(model, [line for line in lines if line.model == model])
                if lines:
                    cursor = lines[-1].id
                    await self._records.drop(cursor)
                if time.time() - self.state.updated > _STATE_SECONDS:
                    await self._write_state()
                if lines:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_SECONDS):
                            await stop.wait()
        finally:
            for model in list(self._open):
                self._close(model, RunState.STOPPED, "the service has ended; it continues every model when it is started again")

    async def _take(self, model: str, lines: Sequence[ModelLine]) -> None:
        """Writes a model's records, in order."""
        run = self._open.pop(model, None) or await self._opened(model)
        self._open[model] = run  # the newest is last
        new = [line for line in lines if _order(line.id) > _order(run.recorder.cursor)]
        sampled = list[ModelLine]()
        for line in new:
            if line.fields["kind"] == "sampled":
                sampled.append(line)
                continue
            self._add_samples(model, run, sampled)
            sampled = []
            record = read_record(line.fields)
            assert isinstance(record, StageStep | StageDone), f"expected a step or an end; found {line.fields['kind']}"
            number = run.recorder.progress.newest + isinstance(record, StageStep)
            run.recorder.add(replace(record, step=number), line.id)
            run.trained_tokens += int(record.metrics["trained_tokens"]) if isinstance(record, StageStep) else 0
        self._add_samples(model, run, sampled)
        if run.recorder.progress.complete:
            self._close(model, RunState.DONE, "")
        else:
            self._write_summary(model, run, RunState.RUNNING, "")
        if len(self._open) > MAX_OPEN:
            self._close(next(iter(self._open)), RunState.STOPPED, "no request for a while")

    def _add_samples(self, model: str, run: _ModelRun, lines: Sequence[ModelLine]) -> None:
        """Writes a file of samples, and its record."""
        if not lines:
            return
        folder, step = self._folder / MODELS / model / "samples", run.recorder.progress.newest
        name = f"served_{lines[-1].id}.jsonl"
        samples = [each for n, line in enumerate(lines) for each in _sample_lines(line.fields, step, run.next_group + n)]
        text = "".join(json.dumps(each) + "\n" for each in samples)
        write_atomically(folder / name, text)
        run.samples.append((name, len(text)))
        dropped = list[str]()
        while len(run.samples) > 1 and sum(size for _, size in run.samples) > self.samples_bytes:
            dropped.append(run.samples.popleft()[0])
        run.next_group += len(lines)
        tokens = sum(each["tokens"] for each in samples)
        run.sampled_tokens += tokens
        served = SamplesServed(file=name, samples=len(samples), tokens=tokens, next_group=run.next_group, dropped=dropped)
        run.recorder.add(served, lines[-1].id)
        for old in dropped:
            (folder / old).unlink(missing_ok=True)

    async def _opened(self, model: str) -> _ModelRun:
        """Opens a model's run directory, or creates it."""
        folder = self._folder / MODELS / model
        with ExitStack() as files:
            files.enter_context(owned(folder))
            if read_run_file(folder) is None:
                await self._create(model, folder)
            (folder / "samples").mkdir(exist_ok=True)
            run = _ModelRun(Recorder.open(folder, model), files, _sample_files(folder / "samples"))
            files.callback(run.recorder.close)
            for line in read_records(folder, model):
                match read_record(line):
                    case SamplesServed(next_group=group, tokens=tokens):
                        run.next_group, run.sampled_tokens = group, run.sampled_tokens + tokens
                    case StageStep(metrics=metrics):
                        run.trained_tokens += int(metrics["trained_tokens"])
            run.files = files.pop_all()
        return run

    async def _create(self, model: str, folder: Path) -> None:
        record = await self._log.record("model", model) or {}
        base_model = record.get("base_model", self._base_model)
        settings = {"name": model, "stage": SERVICE, "tenant": self.name_of(tenant_in(model)), "base_model": base_model}
        known = {"rank": int(record.get("rank", 0)), "user_metadata": json.loads(record.get("metadata", "{}"))}
        write_atomically(folder / "config.yaml", yaml.safe_dump({**settings, **known}, sort_keys=False))
        if (self._folder / VOCABULARY).exists() and not (folder / VOCABULARY).exists():
            (folder / VOCABULARY).hardlink_to(self._folder / VOCABULARY)
        write_run_file(folder, RunFile(model, NO_REDIS))

    def name_of(self, tenant: str) -> str:
        """A tenant's name; without one, the digest of its key."""
        return self._names.get(tenant, tenant)

    def _close(self, model: str, state: RunState, reason: str) -> None:
        run = self._open.pop(model)
        with run.files:
            self._write_summary(model, run, state, reason)

    def _write_summary(self, model: str, run: _ModelRun, state: RunState, reason: str) -> None:
        tokens = {"trained_tokens": run.trained_tokens, "sampled_tokens": run.sampled_tokens}
        numbers = {"stage": SERVICE, **run.recorder.progress.stage_summary(), **tokens}
        write_summary(self._folder / MODELS / model, model, state, reason, numbers)

    async def _write_state(self) -> None:
        """Writes what waits and how busy the workers are."""
        self.counts = await self._records.counts()
        workers: dict[str, WorkerState] = {}
        for worker in WORKERS:
            queued: dict[str, int] = {}
            for place in await self._log.open(worker):
                whose = place.id.rpartition(":")[0]
                queued[whose] = queued.get(whose, 0) + 1
            seconds = self.counts.get(worker, {}).get("busy_seconds", 0.0)
            workers[worker] = WorkerState(self._busy.fraction(worker, time.monotonic(), seconds), queued)
        self.state = ServiceState(self._base_model, time.time(), workers)
        self.state.write(self._folder)


def _sample_files(folder: Path) -> deque[tuple[str, int]]:
    """The files of samples in a folder, the oldest first, and their bytes."""
    files = sorted(folder.glob("served_*.jsonl"), key=lambda file: _order(file.stem.removeprefix("served_")))
    return deque((file.name, file.stat().st_size) for file in files)


def _order(stream_id: str) -> tuple[int, int]:
    first, _, second = stream_id.partition("-")
    return int(first), int(second or 0)


def _sample_lines(group: Line, step: int, number: int) -> list[Line]:
    """The lines of a request's answers in a file of samples."""
    times = {"began": round(group["began"], 5), "generate_seconds": round(group["seconds"], 5)}
    return [
        {
            "iteration": step,
            "group": number,
            "sample": place,
            "prompt": group["prompt"],
            "response": answer["text"],
            "label": "",
            "score": None,
            "parts": {},
            "tokens": len(answer["token_ids"]),
            "prompt_tokens": group["prompt_tokens"],
            "finish_reason": answer["finish_reason"],
            "spans": [[step, 0, len(answer["token_ids"])]],
            "weights": group["weights"],
            "token_ids": answer["token_ids"],
            "logprobs": answer["logprobs"],
            **times,
        }
        for place, answer in enumerate(group["answers"])
    ]
