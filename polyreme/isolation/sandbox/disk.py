"""What a program has on the disk, where its directory is not a file system of its own.

Invariant: a file counts until its bytes are free, also when it has no name any more.
"""

import contextlib
import os
import sys
from pathlib import Path

MOST_FILES = 1024


def used(folder: str, pid: int) -> int:
    """Bytes of the files of a program in its flat directory, given as the kernel names it; sys.maxsize when it has too many, or
    hides some."""
    try:
        before, unlinked = _mapped(folder, pid), _unlinked(folder, pid)
        # Python keeps what it maps open. At both looks: one may have been closed between. (Overlays give them other inodes.)
        if len(before & _mapped(folder, pid)) > len(unlinked):
            return sys.maxsize
    except PermissionError:
        return sys.maxsize
    except OSError:  # it has ended
        unlinked = {}
    return _linked(folder) + sum(unlinked.values())


def _linked(folder: str) -> int:
    blocks = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count > MOST_FILES:
                return sys.maxsize
            with contextlib.suppress(FileNotFoundError):
                blocks += entry.stat(follow_symlinks=False).st_blocks
    return blocks * 512


def _unlinked(folder: str, pid: int) -> dict[int, int]:
    """inode -> bytes of the open files without a name."""
    found: dict[int, int] = {}
    for fd in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed since
            if _is_unlinked(os.readlink(fd), folder):
                file = fd.stat()
                found[file.st_ino] = file.st_blocks * 512
    return found


def _mapped(folder: str, pid: int) -> set[int]:
    """The inodes of the mapped files without a name, which need not be open."""
    lines = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {int(line[4]) for line in lines if _is_unlinked(line[-1], folder)}


def _is_unlinked(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/") and path.endswith(" (deleted)")
