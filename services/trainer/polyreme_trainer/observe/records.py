"""Writes the records of a run or a stage to its directory: metrics.jsonl, samples/, tensorboard/ and summary.json.

Invariant: each record is written once. metrics.jsonl is its own cursor: each line has its run's id and its stream id, so a
restart continues after the run's last whole line. When a resumed learner repeats an iteration, the first record stays. A sample
file is complete before its iteration's line is written. TensorBoard's events are complete by then too, so a restart may repeat
them. Every write is flushed at once, so a full disk raises OSError where it is handled. Nothing on disk stays in memory.
"""

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TextIO

import numpy as np

from polyreme.api.v1.experience_pb2 import FinishReason
from polyreme.errors import PolyremeError
from polyreme.experience.metric_records import Line, MetricRecord, Resumed, StageStep, fields_of
from polyreme.experience.record_codec import TrainedSamples, decode_group
from polyreme.experience.records import GroupRecord, SampleRecord, episode_fields
from polyreme.experience.run import RunState
from polyreme.rundir.progress import Progress, stream_time
from polyreme.rundir.run_records import add_written, write_atomically, write_summary
from polyreme_trainer.observe.board import Board

logger = logging.getLogger(__name__)

_TAIL = 1 << 16

GroupsOf = Callable[[int], Awaitable[tuple[list[bytes], bytes | None]]]
"""Returns the payloads of an iteration's groups, and how the iteration used their samples (None: unknown). Raises PolyremeError
when the log no longer has them."""
_DIGITS = 5
_RESUMED_SECONDS = 5.0
"""Seconds between two records about repeated steps of a stage."""

Clock = Callable[[], float]


class Recorder:
    """The files of one run directory. `open` creates one.

    Attributes:
        progress: what the records show, which are on disk with the samples of their iterations.
        cursor: stream id of the last record that was taken.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        progress: Progress,
        metrics: TextIO,
        board: Board,
        groups_of: GroupsOf | None,
        clock: Clock,
    ) -> None:
        self._folder, self._run_id, self.progress = run_dir, run_id, progress
        self._metrics, self._board, self._groups_of = metrics, board, groups_of
        self._clock, self._said = clock, clock()
        self._state: tuple[RunState, str] | None = None
        self.cursor = "0"

    @classmethod
    def open(
        cls,
        run_dir: Path,
        run_id: str,
        samples_per_iteration: int = 0,
        groups_of: GroupsOf | None = None,
        clock: Clock = time.monotonic,
    ) -> "Recorder":
        """Opens the files of a directory, which exists, and reads what the run has recorded there.

        Args:
            samples_per_iteration: of a run.
            groups_of: reads an iteration's groups from the experience log, and how it used their samples; None: a stage has none.
            clock: returns seconds.

        Raises:
            OSError: a file cannot be written.
            ConfigError: metrics.jsonl is damaged.
        """
        path = run_dir / "metrics.jsonl"
        cut_torn_line(path)
        if groups_of is not None:
            (run_dir / "samples").mkdir(exist_ok=True)
        progress = Progress(samples_per_iteration)
        cursor = add_written(progress, run_dir, run_id)
        with ExitStack() as files:
            metrics = files.enter_context(open(path, "a"))
            board = Board(run_dir / "tensorboard" / run_id)
            files.pop_all()
        recorder = cls(run_dir, run_id, progress, metrics, board, groups_of, clock)
        recorder.cursor = cursor
        return recorder

    async def take(self, records: list[tuple[str, Line]], state: tuple[RunState, str]) -> None:
        """Writes the records that follow the cursor, in order, and the summary when it changes.

        Args:
            state: the run's state and its reason.
        """
        lines, newest = [], self.progress.newest
        taken: list[Line] = [
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
            if not self.progress.repeats(line):
                self._write(line)
                self.cursor = line["id"]
            self.progress.add(line)
        if taken or state != self._state:
            write_summary(self._folder, self._run_id, *state, self.progress.summary())
            self._state = state
        if records:
            self.cursor = records[-1][0]

    def add(self, record: MetricRecord, stream_id: str | None = None) -> None:
        """Writes a record of a stage or a served model. Instead of repeated steps it writes a `resumed` record every few seconds.

        Args:
            stream_id: of a served model's record, whose stream is that of the whole service.
        """
        if self.progress.repeats(fields_of(record)):
            if not isinstance(record, StageStep) or self._clock() - self._said < _RESUMED_SECONDS:
                return
            record, self._said = Resumed(step=record.step), self._clock()
        line = {"run": self._run_id, "time": time.time(), **fields_of(record)}
        if stream_id is not None:
            line |= {"id": stream_id, "time": stream_time(stream_id)}
            self.cursor = stream_id
        self._board.add([line])
        self._write(line)
        self.progress.add(line)

    def close(self) -> None:
        """Closes every file, even when one of them raises."""
        with closing(self._metrics):
            self._board.close()

    def _write(self, line: Line) -> None:
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    async def _write_samples(self, iteration: int) -> Line:
        """Writes an iteration's sample file. Returns `next_group` for its record: the index after the highest one trained."""
        assert self._groups_of is not None, "a run's recorder reads groups"
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


def of_samples(groups: list[GroupRecord], trained: bytes | None) -> list[Line]:
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


def sample_lines(group: GroupRecord) -> Iterator[Line]:
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


def cut_torn_line(path: Path, at_once: int = _TAIL) -> None:
    """Truncates a file after its last whole line; a crash may have left part of another. `at_once`: bytes read at once."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - at_once)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
