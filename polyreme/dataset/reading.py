"""Progress of the readers of data files, for a progress bar.

Invariant: a reader's result does not depend on whether its progress is shown.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Advance = Callable[[int], None]

_advance: ContextVar[Advance] = ContextVar("advance", default=lambda size: None)


@contextmanager
def watched(advance: Advance) -> Iterator[None]:
    """Within the block, `advance` is called with the number of bytes of a data file that were read since the last call."""
    before = _advance.set(advance)
    try:
        yield
    finally:
        _advance.reset(before)


def advance(size: int) -> None:
    """Records that a reader has read this number of bytes of its file."""
    _advance.get()(size)
