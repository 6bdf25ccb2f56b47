"""Threads in which a page reads runs.

Invariant: at most THREADS requests are processed at a time, and at most WAITING requests wait; further ones are refused
immediately. Nothing else in the process waits for these threads, and on a busy machine its other threads have priority.
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
    """Too many requests are waiting."""


class PageThreads:
    """Runs functions in separate threads.

    Args:
        niceness: added to the threads' niceness, 0 to 19. Only Linux has a niceness per thread; elsewhere it is ignored.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness, self._waiting = niceness, 0
        self._threads = ThreadPoolExecutor(THREADS, "page", self._lower_priority)

    async def run(self, function: Callable[..., Answer], *values: object) -> Answer:
        """Returns the function's result. Raises TooBusyError."""
        if self._waiting >= WAITING:
            raise TooBusyError
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *values)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Cancels waiting calls. Running calls finish by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _lower_priority(self) -> None:
        if self._niceness and sys.platform == "linux":
            os.nice(self._niceness)  # on Linux, this affects only the calling thread
