"""Delays the tasks of the test processes at random, as a busy machine does, but far more often.

Invariant: only a task that waited is delayed, and each by itself. What asyncio promises stays true: a new task takes its first step in the
order of creation.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any

SHARE, LONGEST = 0.03, 0.03
"""Share of the wake-ups that are delayed, and the longest delay in seconds."""


def delay_tasks(seed: int) -> None:
    """Delays wake-ups in all event loops of this process until its end. Threads change places more often."""
    rng, call_soon = random.Random(seed), asyncio.BaseEventLoop.call_soon

    def delayed(
        self: asyncio.BaseEventLoop, callback: Callable[..., Any], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        wakes_task = (
            isinstance(getattr(callback, "__self__", None), asyncio.Task) and getattr(callback, "__name__", "") == "task_wakeup"
        )
        if wakes_task and rng.random() < SHARE:
            return self.call_later(rng.random() * LONGEST, callback, *arguments, context=context)
        return call_soon(self, callback, *arguments, context=context)

    asyncio.BaseEventLoop.call_soon = delayed  # type: ignore[method-assign, assignment]
    sys.setswitchinterval(1e-4)
