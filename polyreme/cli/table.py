"""Text tables that people read and other programs cut: aligned columns without borders or colours.

Invariant: pure; no line is wrapped or truncated, so the output is the same on a terminal and in a pipe.
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
