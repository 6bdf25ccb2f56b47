"""A replica's temporary directory, which does not outlive it for long.

Kept here: the directory's lock is held by this process and what it forks, so one without a lock belongs to the dead, and the next
replica on this host removes it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "polyreme-rollout-"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for the block, after those of replicas that were killed are gone."""
    _sweep(Path(tempfile.gettempdir()))
    unnamed = Path(tempfile.mkdtemp(prefix="." + _PREFIX))
    lock = _lock(unnamed)
    folder = unnamed.rename(unnamed.with_name(unnamed.name[1:]))  # locked before it has a name that others sweep
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(root: Path) -> None:
    for folder in root.glob(_PREFIX + "*"):
        with suppress(OSError):  # another user's, gone meanwhile, or in use
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
