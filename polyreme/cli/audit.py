"""`polyreme audit`: the account of a run's experience log, from its Redis or from a run directory whose store has ended."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polyreme.cli.run_directory import EMBEDDED, owned, read_run_file
from polyreme.errors import ConfigError
from polyreme.experience.audit import audit_main
from polyreme.experience.store import EmbeddedServer
from polyreme.net.redis_url import redis_option, without_password


def audit(
    run_dir: Annotated[Path | None, typer.Argument(help="A run's directory; its own store is started when needed.")] = None,
    redis: Annotated[str | None, redis_option("The Redis of a run.")] = None,
    run: Annotated[str | None, typer.Option(help="Run id; none: the directory's, or the newest.")] = None,
) -> None:
    """Account for every group of a run's experience log. The exit status is 0 when nothing is missing or double."""
    found = read_run_file(run_dir) if run_dir else None
    if run_dir and found is None:
        raise ConfigError(f"a run directory at {run_dir}", "no run.json in it", "Give output_dir/name of a run, or --redis.")
    if found and not redis and found.redis != EMBEDDED:
        redis = without_password(found.redis)
    run_id = run or (found.run_id if found else None)
    if redis:
        raise typer.Exit(asyncio.run(audit_main(redis, run_id)))
    if run_dir is None or found is None:
        raise ConfigError("a run to audit", "neither a run directory nor --redis", "Give one of them.")
    with owned(run_dir), EmbeddedServer.start(run_dir / "redis") as server:
        raise typer.Exit(asyncio.run(audit_main(server.url, run_id)))
