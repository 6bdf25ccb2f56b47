"""Wakes the tasks of one event loop that wait for a condition.

Invariant: a waiting task checks its condition after every `notify`. No change between two checks is missed.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ChangeSignal:
    """Runs on one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Makes every waiting task check its condition."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(self, ready: Callable[[], T | None], seconds: float | None = None) -> T | None:
        """The result of `ready` once it is not None; None at the deadline."""
        try:
            async with asyncio.timeout(seconds):
                while (answer := ready()) is None:
                    await self._changed.wait()
                return answer
        except TimeoutError:
            return None
