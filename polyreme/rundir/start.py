"""Prepares a start: a new run or stage, a resumed one, or a fork.

Invariant: this process owns the run directory for the whole block of `start_of`. A fork that does not start leaves no directory.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.experience.run import RunState
from polyreme.hub.resolve import resolve_names
from polyreme.rundir.checks import check_run
from polyreme.rundir.fork import copy_start, plan_fork
from polyreme.rundir.run_directory import (
    Origin,
    RunFile,
    check_resumable,
    claim,
    owned,
    read_config,
    read_names,
    read_run_file,
    read_stage_config,
)
from polyreme.rundir.run_records import read_summary
from polyreme.rundir.start_day import dated, first_day

Config = TypeVar("Config", RunConfig, StageConfig)


@dataclass(frozen=True)
class Start(Generic[Config]):
    """A decision about what to start.

    Attributes:
        config: configuration of the run or stage, with the fork's name for a fork.
        existing: what to continue, or None for a new start.
        origin: origin of a new fork.
        finished: why there is nothing to start, or '' when there is.
        notices: notices of the checks.
    """

    config: Config
    existing: RunFile | None = None
    origin: Origin | None = None
    finished: str = ""
    notices: Sequence[str] = ()


def prepared(
    path: Path, overrides: list[str], resume: bool, fork: bool, only: str | None = None
) -> AbstractContextManager[Start[RunConfig]]:
    """The start of the run that a YAML file with overrides configures, see `start_of`."""
    return start_of(partial(load_config, path), overrides, resume, fork, only)


@contextmanager
def start_of(
    load: Callable[[Sequence[str]], Config], overrides: Sequence[str], resume: bool, fork: bool, only: str | None = None
) -> Iterator[Start[Config]]:
    """Loads and checks the configuration, locks the run directory for the block, and decides what to start.

    Args:
        load: reads the configuration, given key=value overrides.
        resume: continue the directory's run. A service that is started again and again (`only`) starts a new one where there is
            none, unless an override names the run.
        fork: start a new run from a copy of the newest checkpoint.
        only: as in `check_run`.

    Raises:
        ConfigError: the configuration or a file of it is invalid, the directory is in use, or has a run and neither flag is set.
    """
    if resume and fork:
        raise ConfigError("--resume or --fork", "both", "Pass one of them.")
    config: Config = load(overrides)
    if resume and (only is None or any(each.startswith("name=") for each in overrides)):
        check_resumable(config)
    unnamed: Config = load([each for each in overrides if not each.startswith("name=")])
    own_run_dir: Path = unnamed.run_dir
    config = resolve_names(config, [*read_names(config.run_dir), *read_names(own_run_dir)] if resume or fork else ())
    notices = check_run(config, only)
    if not fork:
        with claimed(config, resume, notices) as start:
            yield start
        return
    parent, config = plan_fork(config, own_run_dir)
    forked = read_run_file(parent)
    config = dated(config, first_day(parent, forked.run_id if forked else None))
    was_there = config.run_dir.exists()
    try:
        with owned(config.run_dir):
            yield Start(config, origin=copy_start(parent, config), notices=notices)
    finally:
        if not was_there and read_run_file(config.run_dir) is None:
            shutil.rmtree(config.run_dir, ignore_errors=True)  # the fork did not start


@contextmanager
def claimed(config: Config, resume: bool, notices: Sequence[str] = ()) -> Iterator[Start[Config]]:
    """Locks the run directory of a checked configuration for the block, and decides whether the start continues what it holds.

    Raises:
        ConfigError: the directory is in use, or as `claim` raises it.
    """
    with owned(config.run_dir):
        existing = claim(config, resume)
        config = dated(config, first_day(config.run_dir, existing.run_id if existing else None))
        yield Start(config, existing, finished=_finished(config, existing), notices=notices)


def _finished(config: RunConfig | StageConfig, existing: RunFile | None) -> str:
    """A message when all configured iterations or steps are trained, else ''."""
    summary = read_summary(config.run_dir)
    if existing is None or summary.get("run") != existing.run_id or summary.get("state") != RunState.DONE:
        return ""
    if isinstance(config, StageConfig):
        before, now = read_stage_config(config.run_dir).trainer, config.trainer
        same = (before.steps, before.epochs) == (now.steps, now.epochs)
        return f"stage {existing.run_id} is done: {summary['step']} steps are trained" if same else ""
    trained = read_config(config.run_dir).iterations
    if config.iterations > trained:
        return ""
    return f"run {existing.run_id} is done after {trained} iterations. To train it further, resume with iterations={2 * trained}."
