"""`polyreme audit`: accounts for every group of a run's experience log.

Invariant: an audit writes nothing to a run. It reads the Redis of a running run, or starts a copy of the one of an ended run.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError
from polyreme.experience.audit import audit_main
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.net.redis_url import redis_option, without_password
from polyreme.rundir.run_directory import EMBEDDED, NO_REDIS, no_run, read_run_file, redis_of, unused


def audit(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Directory of a run, running or ended. Starts a copy of the run's own Redis if needed.")
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
    if address := redis or (found and found.redis != EMBEDDED and without_password(found.redis)):
        raise typer.Exit(asyncio.run(audit_main(address, run_id)))
    if run_dir is None or found is None:
        raise ConfigError("a run to audit", "neither a run directory nor --redis", "Pass one of them.")
    with unused(run_dir) as free, tempfile.TemporaryDirectory() as folder:
        if not free:
            raise typer.Exit(asyncio.run(audit_main(redis_of(run_dir, found), run_id)))
        try:
            shutil.copytree(run_dir / "redis", copy := Path(folder, "redis"))
        except OSError as error:
            raise ConfigError(f"a copy of {run_dir / 'redis'} in {folder}", str(error), "Set TMPDIR, or fix this.") from None
        with EmbeddedServer.start(copy) as server:
            raise typer.Exit(asyncio.run(audit_main(server.url, run_id)))
