"""Writes a run's records to its directory: metrics.jsonl, samples/, tensorboard/ and summary.json.

Invariant: each record is written once. metrics.jsonl is its own cursor: each line has its run's id and its stream id, so a restart
continues after the run's last whole line. When a resumed learner repeats an iteration, the first record stays. A sample file is complete
before the line of its iteration is written. TensorBoard's events are complete by then too, so a restart may repeat them. Every write is
flushed at once, so that a full disk raises OSError where it is handled. Nothing that is on disk stays in memory.
"""

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from pathlib import Path

import numpy as np

from polyreme.api.v1.experience_pb2 import FinishReason
from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.experience.record_codec import decode_group
from polyreme.experience.records import GroupRecord, SampleRecord, episode_fields
from polyreme.experience.run import RunState
from polyreme.experience.trained_samples import TrainedSamples
from polyreme.rundir.progress import Progress, Record, stream_time
from polyreme.rundir.reader.scalars import scalars
from polyreme.rundir.run_records import read_records, write_atomically, write_summary

logger = logging.getLogger(__name__)

_TAIL = 1 << 16

GroupsOf = Callable[[int], Awaitable[tuple[list[bytes], bytes | None]]]
"""Returns the payloads of an iteration's groups, and how the iteration used their samples (None: unknown). Raises PolyremeError when the log
no longer has them."""
_DIGITS = 5


class Recorder:
    """The files of one run directory.

    Args:
        config, run_id: the run's configuration and id. Its directory exists.
        groups_of: reads an iteration's groups from the experience log, and how the iteration used their samples.

    Attributes:
        cursor: stream id of the last record that was taken.
    """

    def __init__(self, config: RunConfig, run_id: str, groups_of: GroupsOf) -> None:
        self._run_id, self._groups_of, self._folder = run_id, groups_of, config.run_dir
        self._progress = Progress(config.samples_per_iteration)
        self._state: tuple[RunState, str] | None = None
        self.cursor = "0"
        self._metrics_path = self._folder / "metrics.jsonl"
        cut_torn_line(self._metrics_path)
        for line in read_records(self._folder, run_id):
            self._progress.add(line)
            self.cursor = line["id"]
        (self._folder / "samples").mkdir(exist_ok=True)
        with ExitStack() as files:
            self._metrics = files.enter_context(open(self._metrics_path, "a"))
            self._board = files.enter_context(closing(Board(self._folder / "tensorboard" / run_id)))
            self._files = files.pop_all()

    @property
    def recorded(self) -> int:
        """The newest iteration whose samples are on disk; 0 before the first."""
        return self._progress.newest

    @property
    def evaluations(self) -> Mapping[int, float]:
        """The recorded evaluation results by version, all comparable with `evaluation`."""
        return self._progress.evaluations

    @property
    def evaluation(self) -> Record | None:
        """The newest `eval` record."""
        return self._progress.evaluation

    async def take(self, records: list[tuple[str, Record]], state: tuple[RunState, str]) -> None:
        """Writes the records that follow the cursor, in order, and the summary when it changes.

        Args:
            state: the run's state and its reason.
        """
        lines, newest = [], self._progress.newest
        taken: list[Record] = [
            {"run": self._run_id, "id": stream_id, "time": stream_time(stream_id), **record} for stream_id, record in records
        ]
        for line in taken:
            if line["kind"] == "iteration":
                if line["iteration"] <= newest:
                    continue
                newest = line["iteration"]
                line |= await self._write_samples(newest)
            lines.append(line)
        self._board.add(lines)
        for line in taken:
            if not self._progress.repeats(line):
                self._metrics.write(json.dumps(line) + "\n")
                self._metrics.flush()
                self.cursor = line["id"]
            self._progress.add(line)
        if taken or state != self._state:
            write_summary(self._folder, self._run_id, *state, self._progress.summary())
            self._state = state
        if records:
            self.cursor = records[-1][0]

    def close(self) -> None:
        """Closes every file, even when one of them raises."""
        self._files.close()

    async def _write_samples(self, iteration: int) -> Record:
        """Writes an iteration's sample file. Returns `next_group` for its record: the index after the highest one trained."""
        try:
            payloads, trained = await self._groups_of(iteration)
            groups = [decode_group(payload) for payload in payloads]
            used = of_samples(groups, trained)
        except PolyremeError as error:
            logger.warning("cannot write the sample file of iteration %d: %s", iteration, error)
            return {}
        found = zip((line for group in groups for line in sample_lines(group)), used, strict=True)
        lines = [json.dumps({"iteration": iteration, **line, **fields}) for line, fields in found]
        write_atomically(self._folder / "samples" / f"iteration_{iteration:04d}.jsonl", "".join(line + "\n" for line in lines))
        return {"next_group": max(group.index for group in groups) + 1} if groups else {}


def import_tensorboard() -> None:
    """Imports tensorboardX without torch, when this process has not imported torch already.

    tensorboardX needs torch only to recognise its tensors. The import costs the supervisor seconds and 200 MB.
    """
    if "torch" in sys.modules:
        import_module("tensorboardX")
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        import_module("tensorboardX")
    finally:
        del sys.modules["torch"]


class Board:
    """A TensorBoard event file. tensorboardX's SummaryWriter is not used: it writes in a thread, which dies silently when the disk is full,
    and the next caller then blocks on its queue."""

    def __init__(self, folder: Path) -> None:
        import_tensorboard()
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = RecordWriter(str(folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"))
        self._file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def add(self, lines: list[Record]) -> None:
        """Writes the scalars of lines of metrics.jsonl and flushes them."""
        for line in lines:
            self.add_scalars(scalars(line), line["time"])

    def add_scalars(self, numbers: Iterable[tuple[str, float, int]], at: float) -> None:
        """Writes (tag, value, step), measured at Unix time `at`; they are on disk when it returns."""
        for tag, value, step in numbers:
            self._file.write(self._event(wall_time=at, step=step, summary=self._scalar(tag, value)).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def of_samples(groups: list[GroupRecord], trained: bytes | None) -> list[Record]:
    """For each sample, its advantage, its weight and the optimizer steps that used it; {} if these are unknown."""
    samples = [sample for group in groups for sample in group.samples]
    if trained is None:
        return [{} for _ in samples]
    fields = TrainedSamples.decode(trained).fields([sample.sampled_tokens for sample in samples])
    return [{**used, "advantage": _spread(used["advantage"], sample)} for used, sample in zip(fields, samples, strict=True)]


def _spread(advantage: float | list[float], sample: SampleRecord) -> float | list[float]:
    """A sample's advantages, one for each token if they differ: 0 where the environment wrote."""
    if not isinstance(advantage, list) or not sample.turns:
        return advantage
    sampled, spread = iter(advantage), [0.0] * len(sample)
    for turn in sample.turns:
        for place in range(turn.start, turn.end):
            spread[place] = next(sampled)
    return spread


def sample_lines(group: GroupRecord) -> Iterator[Record]:
    """One line for each sample of a group: text, score, origin, and how it was generated and scored."""
    times = {"began": group.began, "generate_seconds": group.generate_seconds, "score_seconds": group.score_seconds}
    times = {name: round(value, _DIGITS) for name, value in times.items()} if group.began else {}
    for position, sample in enumerate(group.samples):
        numbers = {"token_rewards": sample.token_rewards, "teacher_logprobs": sample.teacher_logprobs}
        yield {
            "group": group.index,
            "attempt": group.attempt,
            "sample": position,
            "prompt": group.prompt,
            "response": sample.text,
            "label": group.label,
            "score": sample.score,
            "parts": {part.name: {"raw": part.raw, "weighted": part.weighted} for part in sample.parts},
            "tokens": sample.sampled_tokens,
            "finish_reason": FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower(),
            "spans": [list(span) for span in sample.spans],
            **{name: values.tolist() for name, values in numbers.items() if values is not None},
            "prompt_tokens": len(group.prompt_of(sample)),
            **times,
            "replicas": list(sample.replicas),
            "calls": [call._asdict() for call in sample.calls],
            "token_ids": sample.token_ids.tolist(),
            "logprobs": np.round(sample.logprobs.astype(np.float64), _DIGITS).tolist(),
            **(episode_fields(group, sample) if group.episodes else {}),
        }


def cut_torn_line(path: Path) -> None:
    """Truncates a file after its last whole line; a crash may have left part of another."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _TAIL)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
