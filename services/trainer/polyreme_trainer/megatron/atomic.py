"""Atomic directories.

Invariant: a directory appears complete or not at all, even across a crash or power failure. Every writer builds its own temporary
directory. A path's next writer removes an earlier one's, which then fails, so no directory has files of two writers.
"""

import contextlib
import glob
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling directory. At the end it is synced and renamed to `path`, which it replaces."""
    temporary = stage(path)
    try:
        yield temporary
    except BaseException:
        discard(temporary)
        raise
    publish(temporary, path)


def stage(path: Path) -> Path:
    """Creates the temporary directory that `publish` renames to `path`, and removes those of earlier writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    discard_unfinished(path.parent, glob.escape(path.name))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    temporary.mkdir()
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Syncs every file below `temporary` and renames it to `path`."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))
    if os.path.lexists(path):
        old = path.with_name(f".{path.name}.old")
        discard(old)
        path.rename(old)
        temporary.rename(path)
        discard(old)
    else:
        temporary.rename(path)
    sync(path.parent)


def discard_unfinished(folder: Path, names: str) -> None:
    """Removes what interrupted writers of directories in `folder` left. `names`: a glob pattern of the directories' names."""
    for pattern in (f".{names}.*.new", f".{names}.old"):
        for path in folder.glob(pattern):
            discard(path)


def discard(path: Path) -> None:
    """Removes a directory tree, a file or a link, if it exists. What cannot be removed, as a file on NFS that is open elsewhere,
    is logged and stays: nothing new depends on its end."""
    is_tree = path.is_dir() and not path.is_symlink()
    if is_tree:
        shutil.rmtree(path, ignore_errors=True)  # a file that stays does not keep the others
    try:
        path.rmdir() if is_tree else path.unlink()
    except FileNotFoundError:  # the usual case, also if another process removes it at the same time
        pass
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
