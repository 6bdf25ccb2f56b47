"""`polyreme status`: one line for each run below some folders or in a Redis, or for each model of a training service.

Invariant: it changes no run. An unreadable one hides no other. A run in both a folder and Redis has one line, with Redis' data.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polyreme.display.report import duration
from polyreme.errors import ConfigError
from polyreme.experience.listing import list_runs
from polyreme.experience.store import connected
from polyreme.net.redis_url import redis_option
from polyreme.rundir.reader import run_directories
from polyreme.rundir.run_status import RunStatus, directory_status, redis_status
from polyreme.rundir.service_status import ModelStatus, ServiceState, is_running, model_statuses
from polyreme.terminal.terminal import TerminalConsole, fitted

logger = logging.getLogger(__name__)

MODELS = ("TENANT", "MODEL", "STATE", "STEPS", "LOSS", "TRAINED", "SAMPLED", "QUEUED", "UPDATED")
HEADER = ("RUN", "STATE", "ITERATION", "RESULT", "REWARD", "REPLICAS", "UPDATED", "PLACE")


def status(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders of them. Default: runs, if there is no --redis.")
    ] = None,
    redis: Annotated[str | None, redis_option("Lists every run of this Redis.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run.")] = False,
) -> None:
    """List runs: state, iteration, newest result, replicas, and why it ended. Of a training service, list its tenants' models."""
    folders = paths or ([] if redis else [Path("runs")])
    console = TerminalConsole(sys.stdout)
    services = {folder: state for folder in folders if (state := ServiceState.read(folder)) is not None}
    for folder, state in services.items():
        models = model_statuses(folder, state)
        told = (
            [json.dumps(asdict(each)) for each in models]
            if as_json
            else service_lines(folder, state, models, time.time(), console.table_width)
        )
        console.print("\n".join(told), soft_wrap=True)
    folders = [folder for folder in folders if folder not in services]
    in_redis = {each.run_id: each for each in asyncio.run(_of_redis(redis))} if redis else {}
    directories = list(dict.fromkeys(each for folder in folders for each in run_directories(folder)))
    stored = [each for each in _in_directories(directories) if each.run_id not in in_redis]
    found = sorted([*in_redis.values(), *stored], key=lambda status: (-(status.updated or 0.0), status.run_id, status.place))
    if services and not found:
        return
    lines = [json.dumps(asdict(each)) for each in found] if as_json else status_lines(found, time.time(), console.table_width)
    if lines:
        console.print("\n".join(lines), soft_wrap=True)


def status_lines(found: list[RunStatus], now: float, width: int | None = None) -> list[str]:
    """The table of `found` at Unix time `now`. Below it the orchestrators of runs with several, and the reasons of those that did
    not end well. `width`: as for `fitted`."""
    if not found:
        return ["no runs"]
    lines = fitted(HEADER, [_cells(each, now) for each in found], width)
    lines += [f"{each.run_id}: {_orchestrators(each)}" for each in found if each.orchestrators]
    return lines + [f"{each.run_id}: {' '.join(each.reason.split())}" for each in found if each.reason]


def service_lines(
    folder: Path, state: ServiceState, models: Sequence[ModelStatus], now: float, width: int | None = None
) -> list[str]:
    """The lines of a service at Unix time `now`: its workers, and a table of its models."""
    workers = [
        f"{name}: {sum(each.queued.values())} requests" + ("" if each.busy is None else f", busy {each.busy:.0%}")
        for name, each in state.workers.items()
    ]
    head = f"{folder}: {state.base_model}, " + ("; ".join(workers) if is_running(folder) else "stopped")
    rows = [
        (
            each.tenant,
            each.model,
            each.state,
            str(each.steps),
            "-" if each.loss is None else f"{each.loss:.4g}",
            str(each.trained_tokens),
            str(each.sampled_tokens),
            str(each.queued),
            "-" if each.updated is None else f"{duration(now - each.updated)} ago",
        )
        for each in models
    ]
    return [head, *(fitted(MODELS, rows, width) if rows else ["no models"])]


def _in_directories(directories: Sequence[Path]) -> Iterator[RunStatus]:
    """The runs of some directories. One that cannot be read is reported and skipped, if it is not the only one."""
    for directory in directories:
        try:
            yield directory_status(directory)
        except (ConfigError, OSError) as error:
            if len(directories) == 1:
                raise
            logger.warning("cannot read the run in %s: %s", directory, error)


async def _of_redis(url: str) -> list[RunStatus]:
    async with connected(url) as redis:
        return [redis_status(listed, url) for listed in await list_runs(redis)]


def _orchestrators(status: RunStatus) -> str:
    """What each has done between the two newest plans."""
    parts = [
        f"{name} {each['groups']} groups" + (f", {each['restarts']} restarts" if each["restarts"] else "")
        for name, each in status.orchestrators.items()
    ]
    return "; ".join(parts)


def _cells(status: RunStatus, now: float) -> tuple[str, ...]:
    replicas = " ".join(f"{name}@{'-' if version is None else version}" for name, version in status.replicas.items())
    of = "" if status.iterations is None else f"/{status.iterations}"
    replay = "" if status.replayed is None else f", replaying {status.replayed} of {status.iteration}"
    return (
        status.run_id,
        status.state,
        "-" if status.iteration is None else f"{status.iteration}{of}{replay}",
        "-" if status.value is None else f"{status.metric} {status.value:.3f}",
        "-" if status.reward is None else f"{status.reward:.3f}",
        replicas or "-",
        "-" if status.updated is None else f"{duration(now - status.updated)} ago",
        status.place,
    )
