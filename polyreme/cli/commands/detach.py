"""A command that continues in the background.

Invariant: the foreground process ends when the background process announces that it runs. If the background process ends before that,
the foreground process ends with its status and message.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

_TAIL_LINES = 20


def into_background(log: Path) -> Callable[[str], None]:
    """Forks a process without a terminal that appends its output to `log`. Returns only in that process.

    Must be called before any thread or event loop starts.

    Returns:
        `announce(text)`, after which the foreground process prints the text and exits with status 0.
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
            pass  # the foreground process has been killed, but the run continues
        finally:
            os.close(write_end)

    return announce


def _wait(read_end: int, child: int, log: Path) -> None:
    """Ends the foreground process. Runs no cleanup, since the background process now owns all resources."""
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
