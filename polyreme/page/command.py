"""`polyreme ui`: serves the page for run directories.

Invariant: it reads run directories and the Redis of live runs, and changes nothing in them but notes.json (see `notes`).
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.experience.listing import attached
from polyreme.net.http_server import serve_http
from polyreme.net.ports import join
from polyreme.net.redis_url import redis_option
from polyreme.page import PATH
from polyreme.page.api import application, is_open
from polyreme.page.runs import Runs
from polyreme.page.server_status import ServerStatus
from polyreme.process.lifecycle import stop_event
from polyreme.process.tasks import running
from polyreme.rundir.reader import run_directories
from polyreme.rundir.run_directory import read_config, read_run_file

PORT = 8430
_ATTACH_SECONDS = 10.0


def ui(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN_DIR]...", help="Run directories, or directories of them. Default: runs.")
    ] = None,
    redis: Annotated[str | None, redis_option("Show the runs in the folder of the newest run in this Redis.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = PORT,
) -> None:
    """Show runs in a web page: curves, samples, timeline, servers, alarms."""
    asyncio.run(_serve(list(paths or ()), redis, host, port))


async def _serve(paths: list[Path], redis: str | None, host: str, port: int) -> None:
    if redis is not None:
        paths.append(await _run_dir(redis))
    paths = paths or [Path("runs")]
    for path in paths:
        run_directories(path)
    runs = Runs(paths)
    security = _security(runs)
    app = application(runs, ServerStatus(redis))
    async with running(runs.keep_current()), serve_http(host, port, app, security=security, is_open=is_open) as bound:
        scheme = "https" if security and security.certificate else "http"
        Console().print(f"{len(runs.readers)} run(s) at {scheme}://{join(host, bound)}{PATH}/", soft_wrap=True, highlight=False)
        await stop_event().wait()


async def _run_dir(redis_url: str) -> Path:
    """The directory of the newest run in a Redis. Raises ConfigError when it is not on this machine."""
    async with attached(redis_url, None, _ATTACH_SECONDS) as run:
        folder = (await run.config()).run_dir
    found = read_run_file(folder)
    if found is None or found.run_id != run.run_id:
        raise ConfigError(
            f"the directory {folder} of run {run.run_id} on this machine",
            "no such directory here",
            "Run `polyreme ui` where the trainer runs, or open /ui on the trainer's HTTP port (`--http-port`).",
        )
    return folder


def _security(runs: Runs) -> SecurityConfig | None:
    """The first run's security: the page requires the same token as the run's services."""
    for reader in runs.readers.values():
        with suppress(ConfigError):
            return read_config(reader.run_dir).security
    return None
