"""What groups in flight have so far, kept in the log, so that an orchestrator's death costs the tokens of a few seconds.

Invariant: what the log has of an attempt is what its drafts here had at some moment, so the next part, and a successor, can go on from it.
A group that is done within the interval is never written.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from polyreme.experience.ledger import Admission, DraftPart, ExperienceLog
from polyreme_trainer.orchestrator.partial_rollouts import BadDraftError, Drafts, Mark, joined, part_since

INTERVAL = 3.0
"""Seconds between two parts of a draft."""
_BATCH_BYTES = 1 << 20


@dataclass
class _Kept:
    """A draft and what the log has of it."""

    admission: Admission
    prompt_ids: np.ndarray
    drafts: Drafts
    marks: Sequence[Mark]
    parts: int
    cuts: int = 0
    since: float = field(default_factory=time.monotonic)


class Snapshots:
    """The drafts of the groups in flight. `interval`: seconds."""

    def __init__(self, log: ExperienceLog, interval: float = INTERVAL) -> None:
        self._log, self._interval = log, interval
        self._left: dict[int, tuple[int, list[bytes]]] = {}
        self._kept: dict[int, _Kept] = {}

    async def load(self, admissions: Sequence[Admission]) -> None:
        """Fetches what a predecessor left of these attempts."""
        attempts = {admission.index: admission.attempt for admission in admissions}
        self._left = {index: (attempts[index], parts) for index, parts in (await self._log.drafts(admissions)).items()}

    @contextmanager
    def of(self, admission: Admission, prompt_ids: np.ndarray, blank: Drafts) -> Iterator[Drafts]:
        """The attempt's drafts: those of a predecessor if they fit, else `blank`. They are kept in the log during the block."""
        attempt, parts = self._left.pop(admission.index, (0, []))
        drafts = blank
        if attempt == admission.attempt:
            try:
                drafts = joined(parts, prompt_ids, blank)
            except BadDraftError:  # another prompt or length than this configuration's: it is replaced
                parts = []
        else:
            parts = []
        kept = self._kept[admission.index] = _Kept(admission, prompt_ids, drafts, drafts.marks(), len(parts))
        try:
            yield drafts
        finally:
            if self._kept.get(admission.index) is kept:  # a later attempt may have begun
                del self._kept[admission.index]

    async def keep(self) -> None:
        """Writes what is new, every interval, for ever."""
        while True:
            await asyncio.sleep(self._interval)
            await self.write()

    async def write(self) -> None:
        """Writes what is new of the groups that are older than the interval."""
        due = time.monotonic() - self._interval
        batch: list[tuple[_Kept, Sequence[Mark], DraftPart]] = []
        for kept in [kept for kept in self._kept.values() if kept.since <= due]:
            if kept.cuts != kept.drafts.cuts:  # what the log has is no beginning of it any more: a first part takes its place
                kept.cuts, kept.parts, kept.marks = kept.drafts.cuts, 0, [(0, 0)] * len(kept.marks)
            marks, index = kept.drafts.marks(), kept.admission.index
            if marks == kept.marks or self._kept.get(index) is not kept:
                continue
            payload = part_since(kept.marks, kept.drafts, kept.prompt_ids)
            batch.append((kept, marks, DraftPart(index, kept.admission.attempt, kept.parts, payload)))
            if sum(len(part.payload) for _, _, part in batch) > _BATCH_BYTES:
                await self._send(batch)
                batch = []
        if batch:
            await self._send(batch)

    async def _send(self, batch: Sequence[tuple[_Kept, Sequence[Mark], DraftPart]]) -> None:
        await self._log.draft([part for _, _, part in batch])
        for kept, marks, part in batch:
            kept.marks, kept.parts = marks, part.number + 1
