"""Saves the partial rollouts of groups in flight in the experience log, so that an orchestrator's death costs seconds of tokens.

Invariant: the log's parts of an attempt equal its partial rollouts at some earlier moment, so the next part, and a successor, can continue
from them. A group that finishes within the interval is never saved.
"""

import asyncio
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from polyreme.experience.ledger import Admission, ExperienceLog, PartialRolloutPart
from polyreme_trainer.orchestrator.partial_rollouts import Mark, PartialRolloutError, PartialRollouts, join_parts, part_since

INTERVAL = 3.0
"""Seconds between two parts of an attempt."""
_BATCH_BYTES = 1 << 20


@dataclass
class _Tracked:
    """The partial rollouts of an attempt, and how much of them the log has."""

    admission: Admission
    prompt_ids: np.ndarray
    rollouts: PartialRollouts
    marks: Sequence[Mark]
    parts: int
    cuts: int = 0
    since: float = field(default_factory=time.monotonic)


class PartialRolloutLog:
    """The partial rollouts of the groups in flight. `interval`: seconds."""

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
    def track(self, admission: Admission, prompt_ids: np.ndarray, blank: PartialRollouts) -> Iterator[PartialRollouts]:
        """The attempt's partial rollouts: a predecessor's if they fit, else `blank`. They are saved regularly during the block."""
        attempt, parts = self._inherited.pop(admission.index, (0, []))
        rollouts = blank
        if attempt == admission.attempt:
            try:
                rollouts = join_parts(parts, prompt_ids, blank)
            except PartialRolloutError:  # another prompt or length than in this configuration: start again
                parts = []
        tracked = self._tracked[admission.index] = _Tracked(admission, prompt_ids, rollouts, rollouts.marks(), len(parts))
        try:
            yield rollouts
        finally:
            if self._tracked.get(admission.index) is tracked:  # a later attempt may have replaced it
                del self._tracked[admission.index]

    async def save_regularly(self) -> None:
        """Calls `save` every interval. Never returns."""
        while True:
            await asyncio.sleep(self._interval)
            await self.save()

    async def save(self, paused: Container[int] = ()) -> None:
        """Saves new tokens of the groups that are older than the interval; with `paused`, of the groups in `paused` whatever their age."""
        async with self._saving:
            await self._save(paused)

    async def _save(self, paused: Container[int]) -> None:
        due = time.monotonic() - self._interval
        batch: list[tuple[_Tracked, Sequence[Mark], PartialRolloutPart]] = []
        for tracked in [
            each for each in self._tracked.values() if (each.admission.index in paused if paused else each.since <= due)
        ]:
            if tracked.cuts != tracked.rollouts.cuts:  # tokens in the log were dropped since: replace its parts from the first on
                tracked.cuts, tracked.parts, tracked.marks = tracked.rollouts.cuts, 0, [(0, 0)] * len(tracked.marks)
            marks, index = tracked.rollouts.marks(), tracked.admission.index
            if marks == tracked.marks or self._tracked.get(index) is not tracked:
                continue
            payload = part_since(tracked.marks, tracked.rollouts, tracked.prompt_ids)
            batch.append((tracked, marks, PartialRolloutPart(index, tracked.admission.attempt, tracked.parts, payload)))
            if sum(len(part.payload) for _, _, part in batch) > _BATCH_BYTES:
                await self._send(batch)
                batch = []
        if batch:
            await self._send(batch)

    async def _send(self, batch: Sequence[tuple[_Tracked, Sequence[Mark], PartialRolloutPart]]) -> None:
        await self._experience.save_partial_rollouts([part for _, _, part in batch])
        for tracked, marks, part in batch:
            tracked.marks, tracked.parts = marks, part.number + 1
