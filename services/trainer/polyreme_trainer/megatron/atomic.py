"""Directories that appear whole or not at all, also across a crash or a power cut."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Gives a temporary sibling to fill; at the end it is synced and renamed to `path`, replacing what is there."""
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
    """Where a directory is made before it gets its name."""
    return path.with_name(f".{path.name}.new")


def publish(temporary: Path, path: Path) -> None:
    """Syncs every file below `temporary` and gives it its name."""
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
    """Removes a directory tree that may not exist."""
    if path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
