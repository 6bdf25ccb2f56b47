"""Text tables for people and for programs: aligned columns without borders or colours.

Invariant: pure; no line is truncated, and output to a pipe does not depend on a terminal's width.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The header and the rows as lines. Columns are two spaces apart; a double-width character counts as two."""
    lines = [tuple(header), *(tuple(" ".join(cell.split()) for cell in row) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return [line.rstrip() for line in padded]


def fitted(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """As `aligned`; if a row would take three or more lines of the terminal, each row becomes a block: its first cell, then the others with
    their headers.

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
