"""The worker's side of the isolation: its limits, its output, and what its errors say.

Invariant: what untrusted code prints or raises leaves the process only in bounded texts.
"""

import io
import os
import resource
import signal
import sys
import traceback

_OUTPUT_CHARS = 4000


class BoundedOutput(io.TextIOBase):
    """Replaces stdout and stderr. Keeps the first characters that an item prints and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[str] = []
        self._room = _OUTPUT_CHARS

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._room > 0:
            kept = text[: self._room]
            self._kept.append(kept)
            self._room -= len(kept)
        return len(text)

    def take(self) -> str:
        """Returns the output since the last call, at most _OUTPUT_CHARS characters."""
        text = "".join(self._kept)
        self._kept, self._room = [], _OUTPUT_CHARS
        return text


def limit_memory(mib: int, beyond: int = 0) -> None:
    """Limits data memory (RLIMIT_DATA) to `mib` MiB plus `beyond` bytes."""
    limit = (mib << 20) + beyond
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def confine() -> BoundedOutput:
    """Resets signals and replaces the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)
    output = BoundedOutput()
    sys.stdout = sys.stderr = output
    return output


def summary(error: BaseException) -> str:
    """The exception and its origin, on one line."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        return f"{type(error).__name__}: {str(error)[:1000]}{where}"
    except Exception:  # noqa: BLE001 str() of a plugin's exception may raise
        return f"{type(error).__name__} (without a printable message)"
