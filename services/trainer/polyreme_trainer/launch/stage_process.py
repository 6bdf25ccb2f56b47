"""The trainer of one stage on this machine: its ranks write the records, and this process shows them and keeps the summary.

Invariant: the stage is `done` when its ranks have recorded that they are, and `stopped` when a stop came first.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from polyreme.config.stage import StageConfig
from polyreme.display.report import plain_line
from polyreme.errors import RunFailedError
from polyreme.experience.metric_records import Line, ServiceNotice, TrackerFailed
from polyreme.experience.run import RunState
from polyreme.process.supervisor import ChildFailedError, ProcessSet
from polyreme.rundir.progress import Progress
from polyreme.rundir.run_records import whole_lines, write_summary
from polyreme_trainer.launch.ranks import compute_environment, rank_programs
from polyreme_trainer.launch.supervision import LEARNER, Supervision

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_STEP_LINE_SECONDS = 5.0
_BEFORE_HANDLER = -signal.SIGTERM
"""Exit status of a rank that is stopped before it has installed its signal handler. Nothing is lost."""


class StageSupervision(Supervision):
    """Supervises one stage. `run` raises PolyremeError when its ranks cannot be kept running.

    Args:
        config, run_id: of the stage; its directory has both.
        log_dir: for the ranks' logs.
        console: shows the records.
        rank: Python's arguments for a rank.
    """

    def __init__(self, config: StageConfig, run_id: str, log_dir: Path, console: Console, rank: Sequence[str] = LEARNER) -> None:
        parallel = config.trainer.parallel
        environment = {**compute_environment(parallel, config.device), "POLYREME_RUN_DIR": str(config.run_dir)}
        self._ranks = ProcessSet("learner", lambda: rank_programs(parallel, rank, environment), log_dir)
        super().__init__(config, run_id, [self._ranks], self._log_notice, self._say_restart)
        self._stage, self._run_dir, self._run_id, self._console = config.stage, config.run_dir, run_id, console
        self._progress = Progress(0)
        self._offset = 0
        """Bytes of metrics.jsonl that were read."""
        self._step_shown = 0.0

    async def run(self) -> RunState:
        former = self._new_records()
        for record in former:
            self._progress.add(record)
        self._progress.complete, self._progress.replayed = False, None
        self.notifier.know(None, min((record["loss"] for record in former if record["kind"] == "eval"), default=None))
        self._write(RunState.RUNNING, "")
        return await super().run()

    async def follow_records(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            self._take()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await ended.wait()

    async def final_state(self) -> tuple[RunState, str]:
        self._take()
        if self._progress.complete:
            return RunState.DONE, ""
        if self.stopped:
            return RunState.STOPPED, f"a stop was requested after step {self._progress.newest} of {self._progress.steps}"
        raise RunFailedError("the ranks to record the stage's end", "none", "See their logs.")

    async def set_end(self, state: RunState, reason: str) -> tuple[RunState, str]:
        return state, reason  # the directory is the only place that has it

    def write_end(self) -> None:
        assert self.end is not None
        self._write(*self.end)

    async def ask_to_drain(self) -> None:
        self._console.print("stopping after the current step, which will be saved; a second signal stops at once")
        self._ranks.signal(signal.SIGTERM)

    def ended_well(self, error: ChildFailedError) -> bool:
        return self.stopped and error.child.poll() == _BEFORE_HANDLER

    def _take(self) -> None:
        """Shows new records; of the step records, only one per interval."""
        records = self._new_records()
        for record in records:
            self._progress.add(record)
            if record["kind"] == "step" and record["step"] < record["steps"]:
                if time.monotonic() - self._step_shown < _STEP_LINE_SECONDS:
                    continue
                self._step_shown = time.monotonic()
            if line := plain_line(record, self._progress, self._progress.steps):
                self._console.print(line, soft_wrap=True, highlight=False)
        self.notifier.take(records)
        if records:
            self._write(RunState.RUNNING, "")

    def _new_records(self) -> list[Line]:
        """This stage's records since the previous call. An incomplete last line is left for the next call."""
        lines = list(whole_lines(self._run_dir / "metrics.jsonl", self._offset))
        self._offset = lines[-1][0] if lines else self._offset
        return [record for _, line in lines if (record := json.loads(line))["run"] == self._run_id]

    def _write(self, state: RunState, reason: str) -> None:
        try:
            numbers = {"stage": self._stage, **self._progress.stage_summary()}
            write_summary(self._run_dir, self._run_id, state, reason, numbers)
        except OSError as error:
            logger.error("cannot write the stage's newest numbers to summary.json: %s", error)

    async def _log_notice(self, record: ServiceNotice | TrackerFailed) -> None:
        """Only the ranks write records, so what a tracker or a receiver failed at is in the log."""
        logger.warning("%s", record.text)

    def _say_restart(self, name: str, found: str) -> None:
        self._console.print(f"restarting the {name}: {found}", soft_wrap=True)
