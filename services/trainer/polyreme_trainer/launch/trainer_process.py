"""The trainer of one run on this host: its processes, its records, and the run's state from how its processes end.

Invariant: the run is `done` when every child exited with status 0, `stopped` when a stop came before the last iteration, `failed`
(with the reason) when a child could not be kept running, and unchanged when another trainer has taken it over. summary.json has
the same state. All learner ranks restart together, from the last checkpoint; an orchestrator restarts alone. Ranks of one machine
are started here; `leader_node` starts those of several.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError, RunFailedError, StoreError
from polyreme.experience.leases import Registry
from polyreme.experience.log_reader import LogReader
from polyreme.experience.metric_records import ReplicasChanged, ServiceNotice
from polyreme.experience.run import Run, RunState
from polyreme.experience.shard import role_of
from polyreme.process.lifecycle import until_set
from polyreme.process.supervisor import ProcessSet, ProcessSpec
from polyreme.rundir.evaluations import comparable
from polyreme.rundir.progress import stream_time
from polyreme.rundir.run_directory import write_replicas
from polyreme.rundir.run_records import write_end
from polyreme.weights.arena import remove_stale
from polyreme_trainer.launch.ranks import compute_environment, rank_programs
from polyreme_trainer.launch.supervision import LEARNER, Supervision
from polyreme_trainer.observe.best_export import BestExport
from polyreme_trainer.observe.board import import_tensorboard
from polyreme_trainer.observe.records import Recorder
from polyreme_trainer.observe.resource_use import ResourceUse, keep_measuring
from polyreme_trainer.observe.vocabulary import write_vocabulary

logger = logging.getLogger(__name__)

_STATE_POLL_SECONDS = 1.0
_REPLICAS_POLL_SECONDS = 2.0
_RECORDS_INTERVAL = 0.5
"""Seconds between two reads of the records: an iteration's arrive one by one, and each read that finds one writes a summary."""
_RECORDS_RETRY_SECONDS = 5.0
_INCOMPARABLE = (
    "earlier results of the evaluation no longer count for hf/best and notices: expected the metric and the held-out data of "
    "this start; found others. Fix: to keep the earlier results, resume with the earlier data.eval, eval_sets and eval_best."
)
RECORDS_KEPT = 2000
"""At least this many records stay in Redis after they are on disk, because live views read them there; at most twice as many."""


class Trainer(Supervision):
    """Supervises one run until all children are done, a stop is requested, or the run is declared failed.

    Args:
        config: the run's configuration.
        run: an existing run.
        process_sets: the processes to keep running.
    """

    def __init__(self, config: RunConfig, run: Run, process_sets: Sequence[ProcessSet]) -> None:
        super().__init__(config, run.run_id, process_sets, run.emit, run.report_restart)
        self._config, self._run, self._use = config, run, ResourceUse()

    async def run(self) -> RunState:
        remove_stale()  # shared memory of trainers that were killed on this host
        try:
            return await super().run()
        finally:  # also when a second signal interrupts this
            remove_stale(self._run.run_id)

    async def set_end(self, state: RunState, reason: str) -> tuple[RunState, str]:
        await self._run.set_state(state, reason)
        return await self._run.state()  # another process may have set an earlier reason

    def write_end(self) -> None:
        assert self.end is not None
        write_end(self._config.run_dir, self._run.run_id, *self.end)
        write_replicas(self._config.run_dir, self._run.run_id, {})

    async def final_state(self) -> tuple[RunState, str]:
        """The final state and its reason when every child exited with status 0."""
        version, iterations = await LogReader(self._run).version(), self._config.iterations
        state, reason = await self._run.state()
        draining = state is RunState.DRAINING  # the children may have ended before this process has read it
        if (self.stopped or draining) and version < iterations:
            why = reason if draining else "stop requested"
            return RunState.STOPPED, f"{why}: {max(0, version)} of {iterations} iterations are trained"
        return RunState.DONE, ""

    async def ask_to_drain(self) -> None:
        logger.info("stopping after the current iteration, which will be saved")
        await self._run.set_state(RunState.DRAINING, "stop requested")

    async def stop_requested(self, signalled: asyncio.Event) -> None:
        """Waits for a signal, or until another process has set the run to draining. Raises when one has declared it failed."""
        async with until_set(signalled):  # also while Redis does not answer
            while True:
                with suppress(StoreError):  # if Redis stays away, the children run out of restarts
                    state, reason = await self._run.state()
                    if state is RunState.DRAINING:
                        return
                    if state is RunState.FAILED:
                        raise RunFailedError("the run to continue", reason, "Fix the cause, then continue with --resume.")
                await asyncio.sleep(_STATE_POLL_SECONDS)

    async def follow_records(self, ended: asyncio.Event) -> None:
        beside = [
            asyncio.create_task(self._report_replicas()),
            asyncio.create_task(keep_measuring(self._use, self._run, self._config.security)),
        ]
        try:
            await self._write_records(ended)
        finally:
            for task in beside:
                task.cancel()

    async def _write_records(self, ended: asyncio.Event) -> None:
        """Writes the run directory's records until `ended` is set and the stream is read to its end."""
        reported = False
        await asyncio.to_thread(import_tensorboard)  # meanwhile the event loop handles signals
        while True:
            try:
                await asyncio.to_thread(write_vocabulary, self._config.run_dir, await self._run.model_files())
                with closing(self._open_recorder()) as recorder:
                    await self._record(recorder, ended)
                    return
            except (PolyremeError, OSError) as error:
                text = f"cannot write records to {self._config.run_dir}: {error}; retrying"
                logger.error("%s", text)
                if not reported:
                    with suppress(PolyremeError):  # the error may be the loss of Redis
                        await self._run.emit(ServiceNotice(service="train", text=text))
                        reported = True
                if ended.is_set():
                    return
                await asyncio.sleep(_RECORDS_RETRY_SECONDS)

    async def _record(self, recorder: Recorder, ended: asyncio.Event) -> None:
        """Copies records from Redis to disk. Sets in Redis which samples are on disk, and trims old records there."""
        recorded, mark, since_mark = -1, recorder.cursor, 0
        self.notifier.know(recorder.progress.evaluation, max(recorder.progress.evaluations.values(), default=None))
        best = BestExport(self._config.run_dir / "hf")
        while True:
            last = ended.is_set()
            batch = self._use.added(await self._run.records(recorder.cursor, block_ms=0))
            before = recorder.progress.evaluation
            await recorder.take(batch, await self._run.state())
            if before and recorder.progress.evaluation and not comparable(before, recorder.progress.evaluation):
                await self._run.emit(ServiceNotice(service="train", text=_INCOMPARABLE))
            self.notifier.take([{"time": stream_time(at), **record} for at, record in batch])
            if any(record["kind"] in ("eval", "saved") for _, record in batch):
                await asyncio.to_thread(best.update, recorder.progress.evaluations)
            if recorder.progress.newest > recorded:
                recorded = recorder.progress.newest
                await self._run.set_recorded(recorded)
                await self._run.discard_trained(recorded)
            since_mark += len(batch)
            if since_mark >= RECORDS_KEPT:
                await self._run.trim_records(mark)
                mark, since_mark = recorder.cursor, 0
            if last and not batch:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECORDS_INTERVAL):
                    await ended.wait()

    def _open_recorder(self) -> Recorder:
        config = self._config
        return Recorder.open(config.run_dir, self._run.run_id, config.samples_per_iteration, self._groups_of)

    async def _groups_of(self, iteration: int) -> tuple[list[bytes], bytes | None]:
        experience = LogReader(self._run)
        plan = await experience.find_plan(iteration)
        return await experience.read(plan) if plan else [], await self._run.trained(iteration)

    async def _report_replicas(self) -> None:
        """Emits the ids of the replicas and the URLs of their /v1 whenever these change."""
        registry, known = Registry(self._run), None
        security = self._config.security
        scheme = "https" if security and security.certificate else "http"
        while True:
            with suppress(PolyremeError, OSError):  # the next poll repeats it
                leases = await registry.leases("rollout")
                there = {lease.id: f"{scheme}://{lease.http_address}/v1" if lease.http_address else "" for lease in leases}
                if there != known:
                    await self._run.emit(ReplicasChanged(replicas=there))
                    await asyncio.to_thread(write_replicas, self._config.run_dir, self._run.run_id, there)
                    known = there
            await asyncio.sleep(_REPLICAS_POLL_SECONDS)


@dataclass(frozen=True)
class RendezvousAddress:
    """The endpoint for the learner's other machines. Without a host: this machine's address towards Redis; port 0: a free one."""

    host: str | None = None
    port: int = 0


def rank_environment(config: RunConfig, run_id: str, redis_url: str) -> dict[str, str]:
    """The environment of every learner rank, on any machine."""
    return {"POLYREME_REDIS": redis_url, "POLYREME_RUN": run_id, **compute_environment(config.trainer.parallel, config.device)}


def trainer_processes(
    config: RunConfig,
    run_id: str,
    redis_url: str,
    log_dir: Path,
    learner_arguments: Sequence[str] = LEARNER,
    rendezvous: RendezvousAddress = RendezvousAddress(),
) -> list[ProcessSet]:
    """The orchestrators and the learner. On one machine the learner is its ranks, with torchrun's environment; on several it is
    the process that leads a launch."""
    shared = {"POLYREME_REDIS": redis_url, "POLYREME_RUN": run_id}

    def orchestrator(number: int) -> list[ProcessSpec]:
        argv = (sys.executable, "-m", "polyreme_trainer.orchestrator", str(number))
        return [ProcessSpec(role_of(number), argv, {**shared, "OMP_NUM_THREADS": "1"})]

    def learner() -> list[ProcessSpec]:
        return rank_programs(config.trainer.parallel, learner_arguments, rank_environment(config, run_id, redis_url))

    def leader() -> list[ProcessSpec]:
        argv = [sys.executable, "-m", "polyreme_trainer.launch", "--log-dir", str(log_dir), "--port", str(rendezvous.port)]
        if rendezvous.host:
            argv += ["--host", rendezvous.host]
        return [ProcessSpec("learner", [*argv, "--", *learner_arguments], shared)]

    programs = learner if config.trainer.parallel.nodes == 1 else leader
    numbers = range(config.trainer.orchestrators)
    orchestrators = [ProcessSet(role_of(number), partial(orchestrator, number), log_dir) for number in numbers]
    return [ProcessSet("learner", programs, log_dir), *orchestrators]
