"""A command that continues in the background.

Invariant: the foreground process ends when the background one has announced that it runs, or with the status and the message of a
background process that ended before.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

_TAIL_LINES = 20


def into_background(log: Path) -> Callable[[str], None]:
    """Splits off a process without a terminal, whose output goes to the end of `log`. Returns only in that process.

    Call it before any thread or event loop starts.

    Returns:
        `announce(text)`: the foreground process prints the text and ends with status 0.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(write_end)
        _wait(read_end, child, log)
    os.close(read_end)
    os.set_inheritable(write_end, False)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)

    def announce(text: str) -> None:
        try:
            os.write(write_end, text.encode())
        except BrokenPipeError:
            pass  # the foreground process was ended; the run is not
        finally:
            os.close(write_end)

    return announce


def _wait(read_end: int, child: int, log: Path) -> None:
    """The foreground process: ends it. What it owns now belongs to the background process, so no cleanup runs here."""
    with os.fdopen(read_end, "rb") as pipe:
        announced = pipe.read()
    if announced:
        sys.stdout.write(announced.decode() + "\n")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    sys.stderr.write("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]) + "\n")
    sys.stderr.flush()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF or 1)
