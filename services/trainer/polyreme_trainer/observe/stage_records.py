"""Writes a stage's records: metrics.jsonl and tensorboard/.

Invariant: each record is written once. When a restarted stage repeats a step or an evaluation, the first record is kept; every few seconds
a `resumed` record says how far the repetition is. Writes are not delayed, so that a full disk raises OSError where it is handled.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from polyreme.rundir.reader.scalars import stage_scalars
from polyreme.rundir.run_records import read_records
from polyreme_trainer.observe.records import Board, cut_torn_line

_RESUMED_SECONDS = 5.0
"""Seconds between two records about repeated steps."""


class StageRecorder:
    """The record files of one run directory, which exists. `clock` returns seconds."""

    def __init__(self, run_dir: Path, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said = clock, clock()
        self._run_id, path = run_id, run_dir / "metrics.jsonl"
        cut_torn_line(path)
        self._newest = {"step": 0, "eval": -1}
        for record in read_records(run_dir, run_id):
            self._note(record)
        with ExitStack() as files:
            self._metrics = files.enter_context(open(path, "a"))
            self._board = files.enter_context(closing(Board(run_dir / "tensorboard" / run_id)))
            self._files = files.pop_all()

    async def emit(self, record: Mapping[str, Any]) -> None:
        """Writes a record, unless it repeats one."""
        kind = record["kind"]
        if kind in self._newest and record["step"] <= self._newest[kind]:
            if kind != "step" or self._clock() - self._said < _RESUMED_SECONDS:
                return
            record = {"kind": "resumed", "step": record["step"]}
            self._said = self._clock()
        line = {"run": self._run_id, "time": time.time(), **record}
        self._board.add_scalars(stage_scalars(line), line["time"])
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        self._note(line)

    def close(self) -> None:
        """Closes every file, even if closing one of them fails."""
        self._files.close()

    def _note(self, line: Mapping[str, Any]) -> None:
        if line["kind"] in self._newest:
            self._newest[line["kind"]] = line["step"]
