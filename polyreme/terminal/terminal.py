"""A console whose terminal may disappear while a command writes to it, and text tables for people and for programs.

Invariant: losing the reader of the output (a closed terminal, `| head`, a `| tee` that the same Ctrl-C has ended) does not end a
run. No line of a table is truncated, and output to a pipe does not depend on a terminal's width.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """A text that cannot command a terminal, or reorder what stands beside it: such characters are escaped, and carriage returns
    left out."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r", ""))


class TerminalConsole(Console):
    """Writes plain text to a stream, and nothing after its reader has gone. Texts of others, such as a policy's, command
    nothing."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=cast(IO[str], _Stream(stream)), markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(harmless(each) if isinstance(each, str) else each for each in objects), **options)

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


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The header and the rows as lines. Columns are two spaces apart; a double-width character counts as two."""
    lines = [tuple(header), *(tuple(" ".join(cell.split()) for cell in row) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return [line.rstrip() for line in padded]


def fitted(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """As `aligned`; if a row would take three or more lines of the terminal, each row becomes a block: its first cell, then the
    others with their headers.

    Args:
        width: width of the terminal; None: the output is not a terminal.
    """
    kept = list(rows)
    lines = aligned(header, kept)
    if width is None or all(cell_len(line) <= 2 * width for line in lines):
        return lines
    names = header[1:]
    return [f"{header[0]}:", *(line for row in kept for line in (row[0], *(f"  {part}" for part in _fields(names, row[1:]))))]


def _fields(names: Sequence[str], cells: Sequence[str]) -> list[str]:
    widest = max(map(cell_len, names))
    return [f"{name}{' ' * (widest - cell_len(name))}  {cell}" for name, cell in zip(names, cells, strict=True)]
