"""The threads in which a page reads runs.

Invariant: at most THREADS answers are made at a time, and at most WAITING requests wait for them; a further one is refused at once. Nothing
else in the process waits for them, and on a busy machine its other threads have priority.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Answer = TypeVar("Answer")

THREADS = 2
WAITING = 64


class TooBusyError(Exception):
    """More requests wait than may."""


class PageThreads:
    """Runs functions in threads of its own.

    Args:
        niceness: by which the threads come after others, 0 to 19. Linux has a niceness for each thread; elsewhere it is
            ignored.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness, self._waiting = niceness, 0
        self._threads = ThreadPoolExecutor(THREADS, "page", self._lower_priority)

    async def run(self, function: Callable[..., Answer], *values: object) -> Answer:
        """The function's result. Raises TooBusyError."""
        if self._waiting >= WAITING:
            raise TooBusyError
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *values)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Drops what waits; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lower_priority(self) -> None:
        if self._niceness and sys.platform == "linux":
            os.nice(self._niceness)  # Linux: of the calling thread
