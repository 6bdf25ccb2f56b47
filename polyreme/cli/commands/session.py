"""Runs the processes of one run on this machine: the services, the trainer and the run's own Redis.

Invariant: when `run` returns or raises, all of them have ended, and the run has a final state in summary.json and, if Redis
answers, in Redis.
"""

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from polyreme.config.run import RunConfig
from polyreme.display import report, view
from polyreme.errors import PolyremeError, RunFailedError, StaleTermError, StoreError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run, RunState
from polyreme.net.ports import free_port, join, loopback
from polyreme.page import PATH
from polyreme.process.lifecycle import OWNER_DIED
from polyreme.process.supervisor import FINAL_CODES, ChildFailedError, ProcessSet, ProcessSpec, Supervisor
from polyreme.process.tasks import end_all
from polyreme.rundir.progress import Progress, stream_time
from polyreme.rundir.run_records import add_written, write_end

_GRACE_SECONDS = 15.0
_RECORDS_INTERVAL = 0.5
_LAST_STATE_SECONDS = 30.0
_BEFORE_HANDLERS = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
"""Exit statuses of a trainer that gets a signal before it installs handlers: that of the signal, or of a KeyboardInterrupt."""


class Session:
    """Runs and supervises the services, the trainer and the own Redis of one run, and shows their progress.

    Attributes:
        page: URL of the run page, on the trainer's HTTP port.
    """

    def __init__(
        self, config: RunConfig, run: Run, url: str, own_store: EmbeddedServer | None, log_dir: Path, console: Console
    ) -> None:
        self._config, self._run, self._own_store, self._log_dir, self._console = config, run, own_store, log_dir, console
        self._url = url
        self._progress = Progress(config.samples_per_iteration)
        self._stopped_by = 0
        self._over = asyncio.Event()  # all iterations are trained and saved: nothing calls the services any more
        self._end: tuple[RunState, str] | None = None  # final state and reason, when the trainer could not set it
        command = (sys.executable, "-m", "polyreme")
        server = ("--redis", url, "--run", run.run_id)

        def process(name: str, *argv: str, serves: bool = True) -> ProcessSet:
            return ProcessSet(name, lambda: [ProcessSpec(name, (*command, *argv), death_signal=OWNER_DIED)], log_dir, serves)

        scorers = {"reward": config.reward, "environment": config.environments}
        online = config.environment.online if config.environment else None
        ports = {"environment": ("--http-port", str(online.port))} if online else {}
        services = [process(name, name, *server, *ports.get(name, ())) for name, section in scorers.items() if section]
        services += [
            process(f"rollout-{place}", "rollout", *server, "--host", loopback()) for place in range(config.rollout.replicas)
        ]
        limit = config.trainer.max_restarts
        self._serving = Supervisor(services, limit, on_restart=run.report_restart)
        port = free_port()
        self.page = f"{'https' if config.security and config.security.certificate else 'http'}://{join(loopback(), port)}{PATH}/"
        ours = ("--log-dir", str(log_dir), "--start", str(run.start), "--host", loopback(), "--http-port", str(port))
        self._trainer = process("train", "train", str(config.run_dir / "config.yaml"), *server, *ours, serves=False)
        self._training = Supervisor([self._trainer], limit, on_restart=run.report_restart)

    async def run(self, stops: "asyncio.Queue[int]") -> int:
        """Runs to the end. Returns the exit status, which is 0 when the run is done, or drained and saved.

        Raises:
            PolyremeError: the run failed. The paths of the logs have been printed.
        """
        ended, gentle = asyncio.Event(), False
        training = asyncio.create_task(self._training.run())
        serving = asyncio.create_task(self._serving.run())
        keeping = asyncio.create_task(self._keep_store())
        stopping = asyncio.create_task(self._stop(stops))
        watching = asyncio.create_task(self._watch(ended))
        leaving = asyncio.create_task(self._leave())
        tasks = (training, serving, keeping, stopping, watching, leaving)
        try:
            while not training.done():
                going = [task for task in (training, serving, keeping, stopping) if not task.done()]
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    self._end = RunState.STOPPED, "a second signal ended the run at once"
                    return 128 + stopping.result()
                if keeping.done():
                    keeping.result()  # raises
                if serving.done() and serving.exception() and not self._over.is_set():
                    await self._declare_failed(serving, training)
            ended.set()
            await asyncio.wait({watching})
            gentle = True
            status = await self._judge(training)
            watching.result()
        except PolyremeError as error:
            self._end = self._end or (RunState.FAILED, str(error))
            raise
        finally:
            if gentle:
                self._over.set()
                await leaving
            await end_all(tasks)  # the supervisors kill the remaining processes
            state, reason = await self._settle_end()
        for line in report.report(self._config, self._progress, self._config.run_dir, state, reason):
            self._say(line)
        return status

    async def _leave(self) -> None:
        """Ends the services once the run is over, while the trainer writes its last records."""
        await self._over.wait()
        await self._serving.stop(_GRACE_SECONDS)

    async def _settle_end(self) -> tuple[RunState, str]:
        """Sets the final state in Redis and in summary.json, unless the trainer did. Returns the state and the reason."""
        state, reason = self._end or (RunState.FAILED, "the trainer ended without setting the run's state")
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                found, why = await self._run.state()
                if found.ended:
                    state, reason = found, why
                else:
                    if state is RunState.STOPPED:
                        await self._run.set_state(RunState.DRAINING, reason)
                    await self._run.set_state(state, reason)
        except StaleTermError:
            return state, reason  # another process has taken over the run
        except (PolyremeError, TimeoutError) as error:
            self._say(f"could not store the run's final state in Redis: {error or 'no answer'}")
        with suppress(OSError):  # the trainer has already reported a full disk
            write_end(self._config.run_dir, self._run.run_id, state, reason)
        return state, reason

    async def _stop(self, stops: "asyncio.Queue[int]") -> int:
        """Drains the trainer at the first signal. Returns the second signal."""
        self._stopped_by = await stops.get()
        self._training.draining = True
        self._trainer.signal(signal.SIGTERM)
        self._say("stopping after the current iteration is finished and saved; a second signal stops immediately")
        while (number := await stops.get()) == signal.SIGHUP:
            pass  # a shell and the kernel may both send SIGHUP
        return number

    async def _keep_store(self) -> None:
        """Restarts the run's own Redis when it dies. Raises StoreError when it died too often, or does not start."""
        if self._own_store is None:
            await asyncio.Event().wait()
        else:
            await self._own_store.keep(self._config.trainer.max_restarts, self._say, "continue with --resume")

    async def _declare_failed(self, serving: "asyncio.Task[None]", training: "asyncio.Task[None]") -> None:
        """Sets the run to failed after a service failed for good, and raises the service's failure."""
        error = serving.exception()
        assert error is not None
        self._end = RunState.FAILED, str(error) if isinstance(error, PolyremeError) else repr(error)
        with suppress(PolyremeError):  # the run has already ended, or Redis does not answer
            await self._run.set_state(*self._end)
        await asyncio.wait({training}, timeout=_LAST_STATE_SECONDS)
        if isinstance(error, ChildFailedError):
            self._point_at(error, error.child.log_path)
        raise error

    async def _judge(self, training: "asyncio.Task[None]") -> int:
        """Returns the exit status after the trainer has ended. Raises the trainer's failure."""
        error = training.exception()
        if isinstance(error, ChildFailedError):
            if self._stopped_by and error.child.poll() in _BEFORE_HANDLERS:
                self._end = RunState.STOPPED, "stopped before training began"
                self._say("stopped before training began")
                return 128 + self._stopped_by
            self._point_at(error, self._log_dir)
            reason = ""
            with suppress(PolyremeError):
                _, reason = await self._run.state()
            self._end = RunState.FAILED, reason or error.found
            raise RunFailedError(
                f"run {self._run.run_id} to be trained", reason or error.found, f"See {error.child.log_path}."
            ) from None
        if error is not None:
            raise error
        return 0

    def _point_at(self, error: ChildFailedError, place: Path | None) -> None:
        """Prints the path of the logs, and the end of the log of a child that reported no reason."""
        if error.child.poll() not in FINAL_CODES:
            self._say(error.child.log_tail(20))
        self._say(f"see {place}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    async def _watch(self, ended: asyncio.Event) -> None:
        """Shows the run's records until `ended` is set and the stream has been read to its end."""
        shown_state, since = None, time.time()
        cursor = await asyncio.to_thread(add_written, self._progress, self._config.run_dir, self._run.run_id)
        with view.view(self._config, self._console, self._url) as shown:
            while True:
                last = ended.is_set()
                try:
                    batch = await self._run.records(cursor, block_ms=0)
                    state, reason = await self._run.state()
                except StoreError as error:
                    shown.status(str(error))
                    if last:
                        return
                    continue
                if state in (RunState.DONE, RunState.STOPPED):
                    self._over.set()
                if state is not shown_state:
                    shown_state = state
                    is_printed_later = state is RunState.FAILED
                    shown.status(f"{state}: {reason}" if reason and not is_printed_later else str(state))
                for cursor, record in batch:
                    line = {"time": stream_time(cursor), **record, "repeated": self._progress.repeats(record)}
                    self._progress.add(line)
                    if line["time"] >= since:  # older records are from before the resume
                        shown.show(line, self._progress)
                if last and not batch:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RECORDS_INTERVAL):
                        await ended.wait()
