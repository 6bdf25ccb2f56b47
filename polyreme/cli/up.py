"""`polyreme up`: a whole run on this machine, from the store to the last process, in the foreground.

Everything it starts is its own and ends with it: on Ctrl-C or SIGTERM the trainer finishes its iteration and saves, a second one
ends all at once, and when this process is killed the kernel tells its children, which end what is theirs.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from redis.asyncio import Redis
from rich.console import Console

from polyreme.cli import view
from polyreme.cli.progress import Progress, stream_time
from polyreme.cli.run_directory import (
    EMBEDDED,
    RunFile,
    check_inputs,
    claim,
    next_attempt,
    open_run,
    owned,
)
from polyreme.cli.summary import plan_lines
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError, RunFailedError, StoreError
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import EmbeddedServer, connect
from polyreme.net.redis_url import redis_option, without_password
from polyreme.process.supervisor import FINAL_CODES, WELL_SECONDS, ChildFailedError, Program, Supervisor, Unit, restart_backoff
from polyreme.weights.arena import SHARED_MEMORY, remove_stale

_GRACE_SECONDS = 15.0
_RECORDS_BLOCK_MS = 500
_STORE_POLL_SECONDS = 0.5
_LAST_STATE_SECONDS = 30.0
_UNHEARD = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
"""How a trainer ends that is told to before it listens: by the signal, or by the KeyboardInterrupt that is made of it."""


def up(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as trainer.optimizer.lr=1e-4.")] = None,
    redis: Annotated[str | None, redis_option("A Redis to use; none: one of the run's own.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the directory's run.")] = False,
    fork: Annotated[bool, typer.Option("--fork", help="Go on from the directory's checkpoint as a new run.")] = False,
) -> None:
    """Train: start every service of a run on this machine and watch it."""
    resolved = load_config(config, overrides or ())
    check_inputs(resolved)
    console = _Console(markup=False, emoji=False, highlight=False)
    with owned(resolved.run_dir):
        existing = claim(resolved, resume, fork)
        status = asyncio.run(_up(resolved, redis, existing, console))
    raise typer.Exit(status)


class _Console(Console):
    """Says nothing more once who read it is gone (`| head`, or a `| tee` that the same Ctrl-C has ended): that ends no run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        heard_there = [descriptor for descriptor in (1, 2) if os.path.sameopenfile(descriptor, self.file.fileno())]
        for descriptor in heard_there:  # what is still buffered goes there at the interpreter's end
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


async def _up(config: RunConfig, redis_url: str | None, existing: RunFile | None, console: Console) -> int:
    for line in plan_lines(config):
        console.print(line, soft_wrap=True)
    async with _store(config, redis_url, existing) as (redis, url, own):
        run = await open_run(redis, config, existing, EMBEDDED if own else url)
        log_dir = next_attempt(config.run_dir)
        console.print(f"run            {run.run_id} in {config.run_dir}, logs in {log_dir}", soft_wrap=True)
        session = _Session(config, run, url, own, log_dir, console)
        try:
            return await session.run(_stop_signals())
        finally:
            await _sweep(run.run_id)


class _Session:
    """The services and the trainer of one run, its store when that is our own, and who watches them."""

    def __init__(
        self, config: RunConfig, run: Run, url: str, own_store: EmbeddedServer | None, log_dir: Path, console: Console
    ) -> None:
        self._config, self._run, self._own_store, self._log_dir, self._console = config, run, own_store, log_dir, console
        self._progress = Progress(config.samples_per_iteration)
        self._stopped_by = 0
        command = (sys.executable, "-m", "polyreme")
        server = ("--redis", url, "--run", run.run_id)

        def unit(name: str, *argv: str, serves: bool = True) -> Unit:
            return Unit(name, lambda: [Program(name, (*command, *argv), death_signal=signal.SIGTERM)], log_dir, serves)

        services = [unit("reward", "reward", *server)]
        services += [
            unit(f"rollout-{place}", "rollout", *server, "--host", "127.0.0.1") for place in range(config.rollout.replicas)
        ]
        self._serving = Supervisor(services, config.trainer.max_restarts)
        ours = ("--log-dir", str(log_dir), "--owner", str(os.getpid()), "--start", str(run.start))
        self._trainer = unit("train", "train", str(config.run_dir / "config.yaml"), *server, *ours, serves=False)
        self._training = Supervisor([self._trainer], config.trainer.max_restarts)

    async def run(self, stops: "asyncio.Queue[int]") -> int:
        """Runs to the end. Returns the exit status: 0 when the run is done, or drained and saved.

        Raises:
            PolyremeError: the run failed; where to look has been printed.
        """
        ended, gentle = asyncio.Event(), False
        training = asyncio.create_task(self._training.run())
        serving = asyncio.create_task(self._serving.run())
        keeping = asyncio.create_task(self._keep_store())
        stopping = asyncio.create_task(self._stop(stops))
        watching = asyncio.create_task(self._watch(ended))
        tasks = (training, serving, keeping, stopping, watching)
        try:
            while not training.done():
                going = [task for task in (training, serving, keeping, stopping) if not task.done()]
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    return 128 + stopping.result()
                if keeping.done():
                    keeping.result()  # raises why
                if serving.done() and serving.exception():
                    await self._declare_failed(serving, training)
            ended.set()
            await asyncio.wait({watching})
            gentle = True
            status = await self._judge(training)
            watching.result()
        finally:
            if gentle:
                await self._serving.stop(_GRACE_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the supervisors kill what is left
        for line in view.report(self._config, self._progress, self._config.run_dir):
            self._say(line)
        return status

    async def _stop(self, stops: "asyncio.Queue[int]") -> int:
        """Drains the trainer at the first signal; returns the second."""
        self._stopped_by = await stops.get()
        self._training.draining = True
        self._trainer.signal(signal.SIGTERM)
        self._say("stopping: the iteration under way is finished and saved; once more ends all at once")
        return await stops.get()

    async def _keep_store(self) -> None:
        """Starts our own Redis again when it dies: what it acknowledged is on disk, and its clients ride over.

        Raises:
            StoreError: it died too often, or does not start.
        """
        deaths = 0
        while True:
            started = time.monotonic()
            while self._own_store is None or self._own_store.alive:  # noqa: ASYNC110 (a process gives no event)
                await asyncio.sleep(_STORE_POLL_SECONDS)
            deaths = 1 if time.monotonic() - started > WELL_SECONDS else deaths + 1
            if deaths > (limit := self._config.trainer.max_restarts):
                raise StoreError(
                    "the run's own Redis to keep running",
                    f"it ended {deaths} times" + (f", and says: {words}" if (words := self._own_store.last_words()) else ""),
                    f"See {self._config.run_dir / 'redis' / 'redis.log'}, then go on with --resume.",
                )
            self._say(f"the run's own Redis has ended; restart {deaths} of {limit}")
            await asyncio.sleep(restart_backoff(first=0.2).draw(deaths))
            try:
                await self._own_store.restart()
            except StoreError:
                if deaths == limit:
                    raise

    async def _declare_failed(self, serving: "asyncio.Task[None]", training: "asyncio.Task[None]") -> None:
        """A service cannot be kept running: ends the run, and raises why."""
        error = serving.exception()
        assert error is not None
        with suppress(PolyremeError):  # already ended, or the store is gone
            await self._run.set_state(RunState.FAILED, str(error) if isinstance(error, PolyremeError) else repr(error))
        await asyncio.wait({training}, timeout=_LAST_STATE_SECONDS)
        if isinstance(error, ChildFailedError):
            self._point_at(error, error.child.log_path)
        raise error

    async def _judge(self, training: "asyncio.Task[None]") -> int:
        """The exit status of a trainer that ended well. Raises why it did not."""
        error = training.exception()
        if isinstance(error, ChildFailedError):
            if self._stopped_by and error.child.poll() in _UNHEARD:
                self._say("stopped before anything was trained")
                return 128 + self._stopped_by
            self._point_at(error, self._log_dir)
            reason = ""
            with suppress(PolyremeError):
                _, reason = await self._run.state()
            raise RunFailedError(
                f"run {self._run.run_id} to be trained", reason or error.found, f"See {error.child.log_path}."
            ) from None
        if error is not None:
            raise error
        return 0

    def _point_at(self, error: ChildFailedError, place: Path | None) -> None:
        """Says where to look, and shows the log's end of a child that did not itself say why it ended."""
        if error.child.poll() not in FINAL_CODES:
            self._say(error.child.log_tail(20))
        self._say(f"see {place}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    async def _watch(self, ended: asyncio.Event) -> None:
        """Shows the run's records until the stream is read to its end after `ended`."""
        cursor, shown_state, since = "0", None, time.time()
        with view.view(self._config, self._console) as shown:
            while True:
                last = ended.is_set()
                try:
                    batch = await self._run.records(cursor, 0 if last else _RECORDS_BLOCK_MS)
                    state, reason = await self._run.state()
                except StoreError as error:
                    shown.status(str(error))
                    if last:
                        return
                    continue
                if state is not shown_state:
                    shown_state = state
                    said_at_the_end = state is RunState.FAILED
                    shown.status(f"{state}: {reason}" if reason and not said_at_the_end else str(state))
                for cursor, record in batch:
                    line = {"time": stream_time(cursor), **record}
                    self._progress.add(line)
                    if line["time"] >= since:  # the others are a resumed run's past
                        shown.show(line, self._progress)
                if last and not batch:
                    return


@asynccontextmanager
async def _store(
    config: RunConfig, url: str | None, existing: RunFile | None
) -> AsyncIterator[tuple[Redis, str, EmbeddedServer | None]]:
    """The run's store: a client, its URL, and the server when it is our own, which ends with the block."""
    if url is None and existing is not None and existing.redis != EMBEDDED:
        url = without_password(existing.redis)
    if url is None and (nodes := config.trainer.parallel.nodes) > 1:
        raise ConfigError(
            f"a Redis that all machines of the learner reach (trainer.parallel.nodes = {nodes})",
            "none: a run's own listens on loopback alone",
            "Give --redis URL.",
        )
    server = await EmbeddedServer.open(config.run_dir / "redis") if url is None else None
    try:
        address = server.url if server else str(url)
        redis = await connect(address)
        try:
            yield redis, address, server
        finally:
            await redis.aclose()
    finally:
        if server:
            server.stop()


def _stop_signals() -> "asyncio.Queue[int]":
    """SIGINT and SIGTERM, as they come."""
    received: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, received.put_nowait, number)
    return received


async def _sweep(run_id: str) -> None:
    """Removes the run's arenas, whose owner may still be on its way out."""
    for _ in range(50):
        remove_stale(run_id)
        if not list(SHARED_MEMORY.glob(f"polyreme-{run_id}-weights-*")):
            return
        await asyncio.sleep(0.1)
