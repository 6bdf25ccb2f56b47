"""The wall-clock seconds of an episode.

Invariant: the clock stands while a turn waits for its token budget, which is no fault of the episode.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class EpisodeClock:
    """A clock that has started.

    Attributes:
        deadline: time on the event loop's clock at which the seconds have passed, unless the clock stands until then.
    """

    def __init__(self, seconds: float) -> None:
        self.deadline = _now() + seconds
        self._limits: set[asyncio.Timeout] = set()
        self._waits, self._stands_since = 0, 0.0

    @property
    def seconds_left(self) -> float:
        """Infinite while the clock stands."""
        return math.inf if self._waits else self.deadline - _now()

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[asyncio.Timeout]:
        """Raises TimeoutError when the seconds have passed within the block; the timeout then says that it has expired."""
        async with asyncio.timeout_at(None if self._waits else self.deadline) as limit:
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stops the clock for a block. Blocks may overlap."""
        if not self._waits:
            self._stands_since = _now()
            self._reschedule(None)
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self.deadline += _now() - self._stands_since
                self._reschedule(self.deadline)

    def _reschedule(self, when: float | None) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(when)


def _now() -> float:
    return asyncio.get_running_loop().time()
