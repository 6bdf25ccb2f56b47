"""A console whose terminal may disappear while a command writes to it.

Invariant: losing the reader of the output (a closed terminal, `| head`, a `| tee` that the same Ctrl-C has ended) does not end a run.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

from rich.console import Console


class TerminalConsole(Console):
    """Writes plain text to a stream, and nothing after its reader has gone."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=cast(IO[str], _Stream(stream)), markup=False, emoji=False, highlight=False)

    @property
    def table_width(self) -> int | None:
        """The width of the terminal for tables; None: the output is not a terminal."""
        return self.width if self.is_terminal else None

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        gone = [descriptor for descriptor in (1, 2) if os.path.sameopenfile(descriptor, self.file.fileno())]
        for descriptor in gone:  # the interpreter flushes its buffers there at exit
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Stream:
    """A stream that reports a closed terminal as a broken pipe."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _hung_up():
            return self._stream.write(text)

    def flush(self) -> None:
        with _hung_up():
            self._stream.flush()


@contextmanager
def _hung_up() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise BrokenPipeError(errno.EPIPE, "the terminal is gone") from None
