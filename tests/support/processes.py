"""Queries about processes, which may end at any moment."""

import psutil  # type: ignore[import-untyped]


def runs(process: psutil.Process | int) -> bool:
    """Whether a process (or pid) exists and is not a zombie."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    """Its command line; empty when it is gone or a zombie."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def descendants() -> list[psutil.Process]:
    """The running descendants of this process."""
    return [process for process in psutil.Process().children(recursive=True) if runs(process)]
