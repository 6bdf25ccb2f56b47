"""Waits for conditions, instead of fixed times.

Invariant: a wait ends as soon as its condition holds. Its deadline is far longer than a slow, loaded machine needs, so reaching it means a
hang.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

DEADLINE = 300.0  # seconds
_POLL = 0.01  # seconds between two checks of conditions without events, such as a process or a file


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = DEADLINE) -> None:
    """Returns when `condition` holds; it may be a coroutine function. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(_POLL)


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected the condition to hold within {seconds:.0f} s")
        time.sleep(_POLL)
