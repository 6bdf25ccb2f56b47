"""Progress bars of long work on a terminal, with the remaining time, or with the elapsed time if the end is unknown.

Invariant: a bar is drawn only if stderr is a terminal, and a bar that has ended leaves nothing there.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")

_UPDATES_PER_BAR = 500
"""A bar is drawn anew at most this often, since an update takes longer than reading a line."""


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar during the block. Yields a function that advances it by an amount of `total`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    waiting = 0
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def count(done: int) -> None:
            nonlocal waiting
            waiting += done
            if waiting * _UPDATES_PER_BAR >= total:
                progress.advance(task, waiting)
                waiting = 0

        yield count


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows the time since the block began. If stderr is not a terminal, prints only one line at the beginning."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def counted(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """Yields the items, `total` in number, and shows a bar."""
    with bar(what, total) as count:
        for item in items:
            yield item
            count(1)
