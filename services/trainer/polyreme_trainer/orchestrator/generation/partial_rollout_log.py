"""Saves what groups in flight have so far in the experience log, so that an orchestrator's death costs seconds of tokens.

Invariant: the log's parts of an attempt equal what it had at some earlier moment, so the next part, and a successor, can continue
from them. A group that finishes within the interval is never saved.
"""

import asyncio
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from polyreme.experience.ledger import Admission, ExperienceLog, PartialRolloutPart
from polyreme_trainer.orchestrator.generation.rollout_parts import PartialRolloutError

INTERVAL = 3.0
"""Seconds between two parts of an attempt."""
_BATCH_BYTES = 1 << 20


class Recoverable(Protocol):
    """What an attempt has so far."""

    @property
    def cuts(self) -> int:
        """How often something was taken back. The parts before are then replaced."""

    def mark(self) -> object:
        """Its progress at this moment; equal as long as nothing is added or taken back."""

    def part_since(self, mark: Any) -> bytes:
        """What was added since `mark`; with None, everything."""

    def restore(self, parts: Sequence[bytes]) -> None:
        """Takes what a predecessor saved. Raises PartialRolloutError, and stays as it is, when it does not fit."""


Saved = TypeVar("Saved", bound=Recoverable)


@dataclass
class _Tracked:
    """An attempt, and how much of it the log has."""

    admission: Admission
    work: Recoverable
    mark: object
    parts: int
    cuts: int = 0
    since: float = field(default_factory=time.monotonic)


class PartialRolloutLog:
    """What the groups in flight have. `interval`: seconds."""

    def __init__(self, experience: ExperienceLog, interval: float = INTERVAL) -> None:
        self._experience, self._interval = experience, interval
        self._inherited: dict[int, tuple[int, list[bytes]]] = {}
        self._tracked: dict[int, _Tracked] = {}
        self._saving = asyncio.Lock()

    async def load(self, admissions: Sequence[Admission]) -> None:
        """Fetches the parts of these attempts that a predecessor saved."""
        attempts = {admission.index: admission.attempt for admission in admissions}
        saved = await self._experience.partial_rollouts(admissions)
        self._inherited = {index: (attempts[index], parts) for index, parts in saved.items()}

    @contextmanager
    def track(self, admission: Admission, work: Saved) -> Iterator[Saved]:
        """The attempt's work, with what a predecessor saved if that fits. It is saved regularly during the block."""
        attempt, parts = self._inherited.pop(admission.index, (0, []))
        if attempt == admission.attempt:
            try:
                work.restore(parts)
            except PartialRolloutError:  # another prompt or length than in this configuration: start again
                parts = []
        tracked = self._tracked[admission.index] = _Tracked(admission, work, work.mark(), len(parts))
        try:
            yield work
        finally:
            if self._tracked.get(admission.index) is tracked:  # a later attempt may have replaced it
                del self._tracked[admission.index]

    async def save_regularly(self) -> None:
        """Calls `save` every interval. Never returns."""
        while True:
            await asyncio.sleep(self._interval)
            await self.save()

    async def save(self, paused: Container[int] = ()) -> None:
        """Saves new tokens of the groups older than the interval; with `paused`, of the groups in `paused` whatever their age."""
        async with self._saving:
            await self._save(paused)

    async def _save(self, paused: Container[int]) -> None:
        due = time.monotonic() - self._interval
        batch: list[tuple[_Tracked, object, PartialRolloutPart]] = []
        size = 0
        for tracked in [
            each for each in self._tracked.values() if (each.admission.index in paused if paused else each.since <= due)
        ]:
            if tracked.cuts != tracked.work.cuts:  # tokens in the log were dropped since: replace its parts from the first on
                tracked.cuts, tracked.parts, tracked.mark = tracked.work.cuts, 0, None
            mark, index = tracked.work.mark(), tracked.admission.index
            if mark == tracked.mark or self._tracked.get(index) is not tracked:
                continue
            payload = tracked.work.part_since(tracked.mark)
            batch.append((tracked, mark, PartialRolloutPart(index, tracked.admission.attempt, tracked.parts, payload)))
            size += len(payload)
            if size > _BATCH_BYTES:
                await self._send(batch)
                batch, size = [], 0
        if batch:
            await self._send(batch)

    async def _send(self, batch: Sequence[tuple[_Tracked, object, PartialRolloutPart]]) -> None:
        await self._experience.save_partial_rollouts([part for _, _, part in batch])
        for tracked, mark, part in batch:
            tracked.mark, tracked.parts = mark, part.number + 1
