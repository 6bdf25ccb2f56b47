"""A replica's temporary directory.

Invariant: a live replica, or a process it forked, holds the lock of its directory. A directory without a lock belongs to a killed
replica, and the next replica on this host removes it.
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
def replica_temp_dir() -> Iterator[Path]:
    """A directory for the block. Removes the directories of killed replicas first."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    hidden = Path(tempfile.mkdtemp(prefix="." + _PREFIX))
    lock = _lock(hidden)
    directory = hidden.rename(hidden.with_name(hidden.name[1:]))  # locked before others can see its name
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for directory in root.glob(_PREFIX + "*"):
        with suppress(OSError):  # another user's, already removed, or in use
            lock = _lock(directory)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
