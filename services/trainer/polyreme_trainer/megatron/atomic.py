"""Atomic directories.

Invariant: a directory appears complete or not at all, even across a crash or a power failure.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling directory. At the end it is synced and renamed to `path`, which it replaces."""
    temporary = staging(path)
    discard(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        discard(temporary)
        raise
    publish(temporary, path)


def staging(path: Path) -> Path:
    """The temporary path at which a directory is built before it is renamed to `path`."""
    return path.with_name(f".{path.name}.new")


def publish(temporary: Path, path: Path) -> None:
    """Syncs every file below `temporary` and renames it to `path`."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        discard(old)
        path.rename(old)
        temporary.rename(path)
        discard(old)
    else:
        temporary.rename(path)
    sync(path.parent)


def discard(path: Path) -> None:
    """Removes a directory tree if it exists."""
    if path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
