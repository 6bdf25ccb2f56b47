"""Which run directories there are at a path.

Invariant: a directory that cannot be read is reported and skipped.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from polyreme.rundir.run_directory import no_run

logger = logging.getLogger(__name__)


def _warn(folder: Path, error: OSError) -> None:
    logger.warning("cannot read %s: %s", folder, error)


def run_directories(path: Path, warn: Callable[[Path, OSError], None] = _warn) -> list[Path]:
    """Run directories at `path`: `path` itself, those directly below it, or a training service's models, the newest start first.

    Args:
        warn: called with a directory that cannot be read, which is skipped.

    Raises:
        ConfigError: there is none.
    """
    if _start_time(path, warn) is not None:
        return [path]
    try:
        folders = [*path.iterdir(), *path.glob("models/*")] if path.is_dir() else []
    except OSError as error:
        warn(path, error)
        folders = []
    found = {folder: start for folder in folders if (start := _start_time(folder, warn)) is not None}
    if not found:
        raise no_run(path, "a run directory, or directories of runs, at")
    return sorted(found, key=lambda folder: -found[folder])


def _start_time(folder: Path, warn: Callable[[Path, OSError], None]) -> float | None:
    """The Unix time of the newest start of the folder's run; None without a run."""
    try:
        return (folder / "run.json").stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn(folder, error)
        return None
