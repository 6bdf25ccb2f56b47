"""`polyreme up`: runs all processes of a run on this machine, in the foreground or detached.

Invariant: every process that it starts ends with it. After Ctrl-C, SIGTERM or SIGHUP the trainer finishes its iteration and
saves. A second signal ends everything at once. When this process is killed, the kernel signals its children, and they end theirs.
A detached run's foreground process ends when the background process announces that it runs, or with its status and message.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from redis.asyncio import Redis
from rich.console import Console

from polyreme.cli.commands.session import Session
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.display.summary import summary_lines
from polyreme.errors import ConfigError
from polyreme.experience.embedded_redis import EmbeddedServer, kept_secret
from polyreme.experience.store import connected
from polyreme.hub.resolve import resolve_names
from polyreme.net.redis_url import exposure, redis_option, without_password
from polyreme.process.machine import other_users
from polyreme.rundir.checks import check_run
from polyreme.rundir.run_directory import EMBEDDED, RunFile, next_attempt, open_run
from polyreme.rundir.start import Start, prepared
from polyreme.terminal.completion import Overrides
from polyreme.terminal.terminal import TerminalConsole
from polyreme.weights.arena import SHARED_MEMORY, remove_stale

_TAIL_LINES = 20


def up(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Overrides = None,
    redis: Annotated[str | None, redis_option("Redis to use. Default: the run's own.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the directory's run.")] = False,
    fork: Annotated[
        bool, typer.Option("--fork", help="Start a new run in a new directory from the run's newest checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the run's summary, and start nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the run has started, and continue in the background.")
    ] = False,
) -> None:
    """Train: start every service of a run on this machine and watch it."""
    console = TerminalConsole(sys.stdout)
    if dry_run:
        resolved = resolve_names(load_config(config, overrides or ()))
        console.print("\n".join(summary_lines(resolved, check_run(resolved))), soft_wrap=True)
        return
    with prepared(config, overrides or [], resume, fork) as start:
        if start.finished:
            console.print(start.finished, soft_wrap=True)
            return
        announce = into_background(start.config.run_dir / "up.log") if detach else None
        status = asyncio.run(train(start, redis, console, announce))
    raise typer.Exit(status)


async def train(
    start: Start[RunConfig], redis_url: str | None, console: Console, announce: Callable[[str], None] | None = None
) -> int:
    """Runs every service of a prepared run to its end. Returns the exit status.

    Args:
        start: the prepared run, whose directory this process owns.
        redis_url: Redis to use, or None for the run's own.
        console: for the summary, the progress and the report.
        announce: called with a message when the run has started.

    Raises:
        PolyremeError: the run failed.
    """
    config = start.config
    url = redis_url or (without_password(start.existing.redis) if start.existing and start.existing.redis != EMBEDDED else None)
    notices = [*start.notices, *filter(None, [exposure(url) if url else "", open_ports(config, other_users())])]
    console.print("\n".join(summary_lines(config, notices)), soft_wrap=True)
    async with _store(config, url, start.existing) as (redis, url, own):
        run = await open_run(redis, config, start.existing, EMBEDDED if own else url, url, start.origin)
        if start.origin:
            console.print(f"forked from    {start.origin.run_id} at iteration {start.origin.iteration}", soft_wrap=True)
        log_dir = next_attempt(config.run_dir)
        console.print(f"run            {run.run_id} in {config.run_dir}, logs in {log_dir}", soft_wrap=True)
        for line in _online_lines(config):
            console.print(line, soft_wrap=True)
        session = Session(config, run, url, own, log_dir, console)
        console.print(f"Redis          {url}", soft_wrap=True)
        console.print(f"page           {session.page}", soft_wrap=True)
        if announce:
            pid = os.getpid()
            announce(
                f"run {run.run_id} in {config.run_dir} continues in the background; `kill {pid}` saves and ends it; output:"
                " up.log"
            )
        try:
            return await session.run(_stop_signals())
        finally:
            await _sweep(run.run_id)


def _online_lines(config: RunConfig) -> list[str]:
    """Where a product opens sessions. Sets the variable of its key for the services, from RUN_DIR/online/key unless it is set."""
    online = config.environment.online if config.environment else None
    if online is None:
        return []
    source = online.key_env
    if not os.environ.get(online.key_env):
        os.environ[online.key_env] = kept_secret(config.run_dir / "online", "key")
        source = str(config.run_dir / "online" / "key")
    return [f"sessions       port {online.port or 'in the log'}; their key is in {source}"]


def open_ports(config: RunConfig, others: Sequence[int]) -> str:
    """A warning if other users of this machine can call the run's services; else ''. `others`: their ids."""
    if not others or (config.security is not None and (config.security.token_env or config.security.mutual)):
        return ""
    return (
        f"other users of this machine ({len(others)} now) can call the run's ports: they can read samples and weights, and "
        "replace weights. Set security.token_env"
    )


@asynccontextmanager
async def _store(
    config: RunConfig, url: str | None, existing: RunFile | None
) -> AsyncIterator[tuple[Redis, str, EmbeddedServer | None]]:
    """Yields the run's Redis: a client, its URL, and the server if it is the run's own, which ends with the block.

    The run's own Redis keeps its previous port if that is free, so that manually started replicas find it again.
    """
    if url is None and (nodes := config.trainer.parallel.nodes) > 1:
        raise ConfigError(
            f"a Redis that all machines of the learner can reach (trainer.parallel.nodes = {nodes})",
            "none: a run's own Redis listens on loopback only",
            "Pass --redis URL.",
        )
    port = urlsplit(existing.redis_url).port if existing and existing.redis == EMBEDDED else None
    server = await EmbeddedServer.open(config.run_dir / "redis", port or 0) if url is None else None
    try:
        address = str(without_password(server.url if server else url))  # the services find its password in their environment
        async with connected(address) as redis:
            yield redis, address, server
    finally:
        if server:
            server.stop()


def _stop_signals() -> "asyncio.Queue[int]":
    """A queue of received SIGINT, SIGTERM and SIGHUP. SIGHUP stays ignored under `nohup`."""
    received: asyncio.Queue[int] = asyncio.Queue()
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
        asyncio.get_running_loop().add_signal_handler(number, received.put_nowait, number)
    return received


async def _sweep(run_id: str) -> None:
    """Removes the run's arenas. Retries, since their owner may still be exiting."""
    for _ in range(50):
        remove_stale(run_id)
        if not list(SHARED_MEMORY.glob(f"polyreme-{run_id}-weights-*")):
            return
        await asyncio.sleep(0.1)


def into_background(log: Path) -> Callable[[str], None]:
    """Forks a process without a terminal that appends its output to `log`. Returns only in that process.

    Must be called before any thread or event loop starts.

    Returns:
        `announce(text)`, after which the foreground process prints the text and exits with status 0.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(write_end)
        _wait(read_end, child, log)
    os.close(read_end)
    os.set_inheritable(write_end, False)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)

    def announce(text: str) -> None:
        try:
            os.write(write_end, text.encode())
        except BrokenPipeError:
            pass  # the foreground process has been killed, but the run continues
        finally:
            os.close(write_end)

    return announce


def _wait(read_end: int, child: int, log: Path) -> None:
    """Ends the foreground process, and at a signal the start. Runs no cleanup, since the background process now owns all
    resources."""
    try:
        with os.fdopen(read_end, "rb") as pipe:
            announced = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os._exit(128 + signal.SIGINT)
    if announced:
        sys.stdout.write(announced.decode() + "\n")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    sys.stderr.write("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]) + "\n")
    sys.stderr.flush()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF or 1)
