"""What the learner tells the observer.

Invariant: a report changes no result. The record of an optimizer step is there before its answer.
"""

import time

from polyreme.experience.metric_records import StageDone
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme.experience.service_records import ServiceRecords
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.wire import ARRIVED, Request


class LearnerReport:
    """Adds records and counters. `meters` measures the requests of models."""

    def __init__(self, records: ServiceRecords) -> None:
        self._records, self.meters = records, StepMeters()

    async def executed(self, place: LogPlace, request: Request, began: float) -> None:
        """Reports a request whose execution began at a Unix time and has just ended."""
        ended, tokens = time.time(), self.meters.take_tokens(place.lane)
        step = self.meters.executed(place.lane, request.fields.get(ARRIVED, began), began, ended)
        if step is not None:
            await self._records.add_step(place.lane, place.seq, step)
        await self._records.count("learner", {"busy_seconds": ended - began})
        await self._records.count(tenant_in(place.lane), {"trained_tokens": tokens, "steps": float(step is not None)})

    async def unloaded(self, model: str, seq: int) -> None:
        """Reports the end of a model."""
        self.meters.forget(model)
        await self._records.add_step(model, seq, StageDone(step=0, hf_path=""))
