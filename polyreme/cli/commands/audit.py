"""`polyreme audit`: accounts for every group of a run's experience log.

Invariant: an audit changes no run. It reads the Redis of a running run, or starts the stored one of a run that has ended.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError
from polyreme.experience.audit import audit_main
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.net.redis_url import redis_option, without_password
from polyreme.rundir.run_directory import EMBEDDED, NO_REDIS, RunFile, no_run, owned, read_run_file, redis_of, unused


def audit(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Directory of a run, running or ended. Starts the run's own Redis if needed.")
    ] = None,
    redis: Annotated[str | None, redis_option("Redis of the run.")] = None,
    run: Annotated[str | None, typer.Option(help="Run id. Default: the directory's run, or the newest one in Redis.")] = None,
) -> None:
    """Account for every group of a run's experience log. The exit status is 0 when no group is missing or duplicated."""
    found = read_run_file(run_dir) if run_dir else None
    if run_dir and found is None:
        raise no_run(run_dir, do="Pass output_dir/name of a run, or --redis.")
    if found and found.redis == NO_REDIS:
        raise ConfigError(f"a run with an experience log at {run_dir}", "a stage, which has none", "Pass the directory of a run.")
    run_id = run or (found.run_id if found else None)
    if address := redis or (run_dir and found and _live(run_dir, found)):
        raise typer.Exit(asyncio.run(audit_main(address, run_id)))
    if run_dir is None or found is None:
        raise ConfigError("a run to audit", "neither a run directory nor --redis", "Pass one of them.")
    with owned(run_dir), EmbeddedServer.start(run_dir / "redis") as server:
        raise typer.Exit(asyncio.run(audit_main(server.url, run_id)))


def _live(run_dir: Path, found: RunFile) -> str | None:
    """URL of the directory's Redis if it is up: an external one, or that of a run in progress. Otherwise None."""
    if found.redis != EMBEDDED:
        return without_password(found.redis)
    with unused(run_dir) as free:
        return None if free else redis_of(run_dir, found)
