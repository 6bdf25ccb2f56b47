"""A replica's temporary directory.

Invariant: a live replica, or a process it forked, holds the lock of its directory. A directory without a lock belongs to a killed
replica, and the next replica of the same user on this host removes it. Its path is short enough for the engine's unix sockets.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyreme.process.temp_root import REPLICA_ROOM, temp_root

_PREFIX = "polyreme-rollout-"


@contextmanager
def replica_temp_dir() -> Iterator[Path]:
    """A directory for the block. Removes the directories of killed replicas first."""
    root = temp_root(REPLICA_ROOM)
    _remove_abandoned(root)
    hidden = Path(tempfile.mkdtemp(prefix="." + _PREFIX, dir=root))
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
            if os.fstat(lock).st_uid == os.getuid():  # others may put any name into a shared directory
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
