"""Supervises one stage on this machine: keeps its learner ranks running, and writes its records to the directory and the terminal.

Invariant: the stage is `done` when its ranks have recorded that they are, `stopped` when a stop came first, `failed` (with the reason) when
they could not be kept running; summary.json has the same state. No rank outlives this process.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from polyreme.config.stage import StageConfig
from polyreme.errors import PolyremeError, RunFailedError
from polyreme.experience.run import RunState
from polyreme.process.lifecycle import stop_event
from polyreme.process.supervisor import ChildFailedError, ProcessSet, Supervisor
from polyreme.rundir.run_records import write_summary
from polyreme_trainer.launch.ranks import compute_environment, rank_programs
from polyreme_trainer.launch.stage_progress import StageProgress, line_of
from polyreme_trainer.launch.trainer_process import DRAIN_SECONDS, LEARNER

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_STEP_LINE_SECONDS = 5.0
_STOP_GRACE_SECONDS = 10.0
_BEFORE_HANDLER = -signal.SIGTERM
"""Exit status of a rank that is stopped before it has installed its signal handler. Nothing is lost."""


class StageProcess:
    """The supervision of one stage.

    Args:
        config, run_id: of the stage; its directory has both.
        log_dir: for the ranks' logs.
        console: shows the records.
        rank: Python's arguments for a rank.
    """

    def __init__(self, config: StageConfig, run_id: str, log_dir: Path, console: Console, rank: Sequence[str] = LEARNER) -> None:
        self._config, self._run_id, self._console = config, run_id, console
        parallel = config.trainer.parallel
        environment = {**compute_environment(parallel, config.device), "POLYREME_RUN_DIR": str(config.run_dir)}
        self._ranks = ProcessSet("learner", lambda: rank_programs(parallel, rank, environment), log_dir)
        self._supervisor = Supervisor([self._ranks], config.trainer.max_restarts, on_restart=self._say_restart)
        self._progress = StageProgress()
        self._read = 0
        """Bytes of metrics.jsonl."""
        self._step_shown = 0.0
        for record in self._new_records():  # of former starts
            self._progress.add(record)
        self._progress.complete, self._progress.replayed = False, None

    async def run(self) -> RunState:
        """Runs the ranks until the stage is done, or stopped and saved. Returns which. Raises PolyremeError when they cannot be kept running."""
        self._write(RunState.RUNNING, "")
        work = asyncio.create_task(self._supervisor.run())
        stopped = asyncio.create_task(stop_event().wait())
        try:
            while not work.done() and not stopped.done():
                await asyncio.wait((work, stopped), timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._show()
            if not work.done():
                await self._drain(work)
            await self._end_of(work, stopped.done())
            state, reason = self._outcome(stopped.done())
        except PolyremeError as error:
            self._write(RunState.FAILED, str(error))
            raise
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
        self._write(state, reason)
        return state

    async def _drain(self, work: "asyncio.Task[None]") -> None:
        self._console.print("stopping after the current step, which will be saved; a second signal stops at once")
        self._supervisor.draining = True
        self._ranks.signal(signal.SIGTERM)
        await asyncio.wait({work}, timeout=DRAIN_SECONDS)
        if not work.done():
            await self._supervisor.stop(_STOP_GRACE_SECONDS)

    async def _end_of(self, work: "asyncio.Task[None]", stopped: bool) -> None:
        try:
            await work
        except ChildFailedError as error:
            if not (stopped and error.child.poll() == _BEFORE_HANDLER):
                raise

    def _outcome(self, stopped: bool) -> tuple[RunState, str]:
        self._show()
        if self._progress.complete:
            return RunState.DONE, ""
        if stopped:
            return RunState.STOPPED, f"a stop was requested after step {self._progress.step} of {self._progress.steps}"
        raise RunFailedError("the ranks to record the stage's end", "none", "See their logs.")

    def _show(self) -> None:
        """Prints new records; of the step records, only one per interval."""
        records = self._new_records()
        for record in records:
            self._progress.add(record)
            if record["kind"] == "step" and record["step"] < record["steps"]:
                if time.monotonic() - self._step_shown < _STEP_LINE_SECONDS:
                    continue
                self._step_shown = time.monotonic()
            if line := line_of(record, self._progress.step):
                self._console.print(line, soft_wrap=True, highlight=False)
        if records:
            self._write(RunState.RUNNING, "")

    def _new_records(self) -> list[dict[str, Any]]:
        """This stage's records since the previous call. An incomplete last line is left for the next call."""
        with suppress(FileNotFoundError), open(self._config.run_dir / "metrics.jsonl", "rb") as file:
            file.seek(self._read)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            return [record for line in whole.splitlines() if (record := json.loads(line))["run"] == self._run_id]
        return []

    def _write(self, state: RunState, reason: str) -> None:
        numbers = {"stage": self._config.stage, **self._progress.numbers()}
        try:
            write_summary(self._config.run_dir, self._run_id, state, reason, numbers)
        except OSError as error:
            logger.error("cannot write the stage's newest numbers to summary.json: %s", error)

    def _say_restart(self, name: str, found: str) -> None:
        self._console.print(f"restarting the {name}: {found}", soft_wrap=True)
