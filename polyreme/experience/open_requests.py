"""The open requests of a worker of the training service, as its process sees them.

Invariant: a request that waits is seen within two seconds, also when its event is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from polyreme.experience.requests import LogPlace, RequestLog, Worker
from polyreme.process.tasks import end_all

MAX_BYTES = 16 << 20
"""Most bytes of requests that are kept until the worker asks for them. It reads the others from the log."""


class OpenRequests:
    """What waits for a worker, after `look`.

    Attributes:
        places: the open requests, by arrival.
    """

    def __init__(self, log: RequestLog, worker: Worker, last: str, most_bytes: int) -> None:
        """Use `of`."""
        self.places = list[LogPlace]()
        self._log, self._worker, self._last, self._most_bytes, self._newest = log, worker, last, most_bytes, 0.0
        self._begun, self._payloads = dict[str, int](), dict[str, bytes]()
        self._event: asyncio.Task[tuple[str, list[str]]] | None = None

    @classmethod
    @asynccontextmanager
    async def of(cls, log: RequestLog, worker: Worker, most_bytes: int = MAX_BYTES) -> AsyncIterator[Self]:
        """The requests of a worker. Nothing waits for them after the block."""
        requests = cls(log, worker, await log.last_event(worker), most_bytes)
        try:
            yield requests
        finally:
            if requests._event is not None:
                await end_all([requests._event])

    async def look(self) -> None:
        """Reads what is open now. Raises StoreError."""
        room = self._most_bytes - sum(map(len, self._payloads.values()))
        found = await self._log.waiting(self._worker, self._newest, room)
        self.places, self._newest, self._begun = found.places, found.newest, found.begun
        kept = self._payloads | found.payloads
        self._payloads = {place.id: kept[place.id] for place in found.places if place.id in kept}

    def has_begun(self, place: LogPlace) -> bool:
        """Whether the execution of a request had begun, of this process or an earlier one."""
        return place.id in self._begun

    async def take(self, places: Sequence[LogPlace]) -> list[bytes]:
        """The payloads of open requests, each of which is kept no longer. Raises StoreError."""
        missing = [place for place in places if place.id not in self._payloads]
        read = dict(zip(missing, await self._log.payloads(missing), strict=True))
        return [read[place] if place in read else self._payloads.pop(place.id) for place in places]

    async def news(self, others: Iterable[asyncio.Task[None]] = ()) -> bool:
        """Returns when a request may have come since the last call, which is after two seconds at the latest, or when another
        task has ended. Returns whether one may have come. Raises StoreError."""
        if self._event is None:
            self._event = asyncio.create_task(self._log.wait(self._worker, self._last))
        await asyncio.wait({self._event, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not self._event.done():
            return False
        event, self._event = self._event, None
        self._last, _ = event.result()
        return True
