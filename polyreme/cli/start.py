"""What `polyreme up` and `polyreme train` start: a new run, the directory's own run again, or a fork of it.

Invariant: the run directory is owned as long as the block of `prepared` lasts, and a fork that never began leaves no directory.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyreme.cli.checks import check_run
from polyreme.cli.fork import copy_start, plan_fork
from polyreme.cli.run_directory import Origin, RunFile, claim, owned, read_config, read_run_file
from polyreme.cli.run_records import read_summary
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.experience.run import RunState


@dataclass(frozen=True)
class Start:
    """What a command starts.

    Attributes:
        config: of the run; a fork's has the fork's name.
        existing: the run to continue; None: a new one.
        origin: of a fork that begins.
        finished: why there is nothing to start; empty: there is.
        notices: what the checks remarked.
    """

    config: RunConfig
    existing: RunFile | None = None
    origin: Origin | None = None
    finished: str = ""
    notices: Sequence[str] = ()


@contextmanager
def prepared(path: Path, overrides: list[str], resume: bool, fork: bool, only: str | None = None) -> Iterator[Start]:
    """Reads the configuration, owns the run directory for the block, and decides which run is meant.

    Args:
        only: as `check_run` takes it.

    Raises:
        ConfigError: the configuration or its files are wrong, the directory is in use, or it holds a run and no flag says what to do.
    """
    if resume and fork:
        raise ConfigError("--resume or --fork", "both", "Give one of them.")
    config = load_config(path, overrides)
    notices = check_run(config, only)
    if not fork:
        with owned(config.run_dir):
            existing = claim(config, resume)
            yield Start(config, existing, finished=_finished(config, existing), notices=notices)
        return
    own_run_dir = load_config(path, [each for each in overrides if not each.startswith("name=")]).run_dir
    parent, config = plan_fork(config, own_run_dir)
    was_there = config.run_dir.exists()
    try:
        with owned(config.run_dir):
            yield Start(config, origin=copy_start(parent, config), notices=notices)
    finally:
        if not was_there and read_run_file(config.run_dir) is None:
            shutil.rmtree(config.run_dir, ignore_errors=True)  # it never began


def _finished(config: RunConfig, existing: RunFile | None) -> str:
    """Says that a run has trained all iterations that the configuration asks for; empty: it has not."""
    if existing is None:
        return ""
    summary = read_summary(config.run_dir)
    done = summary.get("run") == existing.run_id and summary.get("state") == RunState.DONE
    trained = read_config(config.run_dir).iterations
    if not done or config.iterations > trained:
        return ""
    return f"run {existing.run_id} is done: {trained} iterations are trained. To train it further, resume with iterations={2 * trained}."
