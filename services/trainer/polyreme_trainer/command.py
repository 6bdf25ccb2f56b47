"""`polyreme train`: opens a run, or joins the one that `polyreme up` has opened, and supervises its trainer to the end."""

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from polyreme import logs
from polyreme.config import RunConfig
from polyreme.configfile import load_config
from polyreme.log.run import Run
from polyreme.log.store import connect
from polyreme.plan import plan_lines
from polyreme.rundir import RunFile, check_inputs, claim, next_attempt, open_run, owned
from polyreme_trainer.exporter import export
from polyreme_trainer.supervisor import Trainer, trainer_units

_log = logging.getLogger(__name__)

_ATTACH_SECONDS = 10.0


def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as trainer.optimizer.lr=1e-4.")] = None,
    redis: Annotated[str, typer.Option(envvar="POLYREME_REDIS", help="URL of the run's Redis.")] = "redis://127.0.0.1:6379",
    run: Annotated[str | None, typer.Option(help="Id of a run that is there already; none: create it.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="For the children's logs; none: the run directory's next attempt.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the directory's run.")] = False,
    fork: Annotated[bool, typer.Option("--fork", help="Go on from the directory's checkpoint as a new run.")] = False,
    host: Annotated[str, typer.Option(help="Address of the HTTP port.")] = "127.0.0.1",
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serves /health, /ready, /metrics; 0: a free one; none: no port.")
    ] = None,
) -> None:
    """Train a run: supervise its orchestrator and learner ranks, and write its records."""
    logs.setup("train")
    resolved = load_config(config, overrides or ())
    check_inputs(resolved)
    with owned(resolved.run_dir) if run is None else nullcontext():
        existing = claim(resolved, resume, fork) if run is None else None
        logs_to = log_dir or next_attempt(resolved.run_dir)
        asyncio.run(_train(resolved, redis, run, logs_to, existing, (host, http_port)))


async def _train(
    config: RunConfig,
    redis_url: str,
    run_id: str | None,
    log_dir: Path,
    existing: RunFile | None,
    http: tuple[str, int | None],
) -> None:
    redis = await connect(redis_url)
    try:
        if run_id is None:
            run = await open_run(redis, config, existing, redis_url)
            for line in plan_lines(config):
                _log.info(line)
        else:
            run = await Run.attach(redis, run_id, _ATTACH_SECONDS)
        async with export(run, config, *http) as port:
            if port is not None:
                _log.info("metrics at port %d", port)
            await Trainer(config, run, trainer_units(config, run.run_id, redis_url, log_dir)).run()
    finally:
        await redis.aclose()
