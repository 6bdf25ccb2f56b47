"""The trainer of one run on this host: its processes, and the run's state from their ends.

The run is done when every child ended well, failed (with the reason) when they could not be kept running, and untouched when
another trainer has taken it over. All learner ranks restart together, from the last checkpoint; the orchestrator alone. Ranks of one
machine are started here; how those of several are is in `machines`.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError, RunFailedError, StaleTermError, StoreError
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.net.ports import free_port
from polyreme.process.lifecycle import stop_event
from polyreme.process.supervisor import Program, Supervisor, Unit
from polyreme.weights.arena import remove_stale
from polyreme_trainer.observe.records import Recorder

_log = logging.getLogger(__name__)

_STATE_POLL_SECONDS = 1.0
_STOP_GRACE_SECONDS = 10.0
DRAIN_SECONDS = 540.0
"""For the iteration under way and its save, after a stop was asked for. Compose and Kubernetes kill what has not ended ten minutes after:
the last one is for ending what does not drain, for the run's state and for its records."""
_RECORDS_BLOCK_MS = 1000
_RECORDS_RETRY_SECONDS = 5.0


class Trainer:
    """One run's supervision and its three ends: all children done, a stop asked for, the run declared failed.

    Args:
        config: of the run.
        run: there already.
        units: what to keep running.
        owner: pid of the `polyreme up` that started this process, whose death leaves nothing to drain with; None: started by itself.
    """

    def __init__(self, config: RunConfig, run: Run, units: Sequence[Unit], owner: int | None = None) -> None:
        self._config, self._run, self._owner, self._orphaned = config, run, owner, False
        self._supervisor = Supervisor(units, config.trainer.max_restarts)

    async def run(self) -> None:
        """Returns when the run is done, or drained and saved. Raises what ended it otherwise, having told the run record."""
        remove_stale()  # what trainers that were killed have left on this host
        ended = asyncio.Event()
        records = asyncio.create_task(self._write_records(ended))
        try:
            await self._supervise()
            await self._run.set_state(RunState.DONE)
        except StaleTermError:
            raise  # the run is another trainer's now
        except PolyremeError as error:
            if not self._orphaned:
                with suppress(PolyremeError):  # the store may be what is gone
                    await self._run.set_state(RunState.FAILED, str(error))
            raise
        finally:
            ended.set()
            if self._orphaned:
                records.cancel()
            try:
                await asyncio.gather(records, return_exceptions=self._orphaned)
            finally:  # also when a second signal ends all at once
                remove_stale(self._run.run_id)

    async def _supervise(self) -> None:
        work = asyncio.create_task(self._supervisor.run())
        stopped = asyncio.create_task(stop_event().wait())
        failed = asyncio.create_task(self._declared_failed())
        tasks = (work, stopped, failed)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not work.done():
                await self._drain(work)
            await (work if work.done() or stopped.done() else failed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, work: asyncio.Task[None]) -> None:
        """Lets the children finish the iteration under way and save; ends those that cannot."""
        self._supervisor.draining = True
        if self._owner not in (None, os.getppid()):  # `up` was killed, and its services and perhaps its store with it
            self._orphaned = True
            _log.warning("stopping at once: the process that started this one is gone")
            await self._supervisor.stop(_STOP_GRACE_SECONDS)
            return
        _log.info("stopping: the iteration under way is finished and saved")
        try:
            await self._run.set_state(RunState.DRAINING, "a stop was asked for")
            await asyncio.wait({work}, timeout=DRAIN_SECONDS)
        except StaleTermError:
            raise  # another trainer's learner has the run: there is nothing to wait for
        except PolyremeError as error:
            _log.error("cannot ask the children to drain: %s", error)
        if not work.done():
            await self._supervisor.stop(_STOP_GRACE_SECONDS)

    async def _declared_failed(self) -> None:
        """Waits until somebody declares the run failed, and raises that."""
        while True:
            with suppress(StoreError):  # back soon, or the children's restarts run out
                state, reason = await self._run.state()
                if state is RunState.FAILED:
                    raise RunFailedError("the run to go on", reason, "Mend the cause, then go on with --resume.")
            await asyncio.sleep(_STATE_POLL_SECONDS)

    async def _write_records(self, ended: asyncio.Event) -> None:
        """Keeps the run directory's records up to date until the stream is read to its end after `ended`."""
        told = False
        await asyncio.to_thread(import_module, "tensorboardX")  # takes a second, in which signals would not be heard
        while True:
            try:
                with closing(Recorder(self._config, self._run.run_id, self._groups_of)) as recorder:
                    while True:
                        last = ended.is_set()
                        batch = await self._run.records(recorder.cursor, block_ms=0 if last else _RECORDS_BLOCK_MS)
                        await recorder.take(batch)
                        if last and not batch:
                            return
            except (PolyremeError, OSError) as error:
                text = f"records are not being written to {self._config.run_dir}: {error}; tried again until they are"
                _log.error("%s", text)
                if not told:
                    with suppress(PolyremeError):  # the store may be what is gone
                        await self._run.emit({"kind": "notice", "service": "train", "text": text})
                        told = True
                if ended.is_set():
                    return
                await asyncio.sleep(_RECORDS_RETRY_SECONDS)

    async def _groups_of(self, iteration: int) -> list[bytes]:
        log = ExperienceLog(self._run)
        plan = await log.find_plan(iteration)
        return await log.read(plan) if plan else []


LEARNER = ("-m", "polyreme_trainer.learner")
"""What Python runs as a learner rank."""


@dataclass(frozen=True)
class MeetingPlace:
    """Where the learner's ranks of other machines find this one's. None: its address on the way to Redis; 0: a free port."""

    host: str | None = None
    port: int = 0


def rank_environment(config: RunConfig, run_id: str, redis_url: str) -> dict[str, str]:
    """What every learner rank gets, wherever it runs."""
    return {
        "POLYREME_REDIS": redis_url,
        "POLYREME_RUN": run_id,
        "OMP_NUM_THREADS": str(config.trainer.parallel.threads),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread takes the core that another process needs
    }


def trainer_units(
    config: RunConfig,
    run_id: str,
    redis_url: str,
    log_dir: Path,
    learner_arguments: Sequence[str] = LEARNER,
    place: MeetingPlace = MeetingPlace(),
) -> list[Unit]:
    """The orchestrator, and the learner: its ranks under torchrun's environment contract, or who leads those of several machines."""
    shared = {"POLYREME_REDIS": redis_url, "POLYREME_RUN": run_id}

    def orchestrator() -> list[Program]:
        return [
            Program("orchestrator", (sys.executable, "-m", "polyreme_trainer.orchestrator"), {**shared, "OMP_NUM_THREADS": "1"})
        ]

    def learner() -> list[Program]:
        ranks, port = config.trainer.parallel.world_size, free_port()
        return [
            Program(
                f"learner-{rank}",
                (sys.executable, *learner_arguments),
                {
                    **rank_environment(config, run_id, redis_url),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(ranks)
        ]

    def leader() -> list[Program]:
        options = ("--log-dir", str(log_dir), "--port", str(place.port), *(("--host", place.host) if place.host else ()))
        return [Program("learner", (sys.executable, "-m", "polyreme_trainer.launch", *options, "--", *learner_arguments), shared)]

    programs = learner if config.trainer.parallel.nodes == 1 else leader
    return [Unit("learner", programs, log_dir), Unit("orchestrator", orchestrator, log_dir)]
