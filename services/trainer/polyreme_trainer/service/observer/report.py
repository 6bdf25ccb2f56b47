"""What the learner tells the observer.

Invariant: a report changes no result. The record of an optimizer step is there before its answer.
"""

from collections import Counter
from collections.abc import Coroutine, Mapping

from polyreme.experience.metric_records import StageDone
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme.experience.service_records import ServiceRecords
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.wire import ARRIVED, Request


class LearnerReport:
    """Adds records and counters. `meters` measures the requests of models."""

    def __init__(self, records: ServiceRecords) -> None:
        self._records, self.meters = records, StepMeters()

    async def executed(self, requests: Mapping[LogPlace, Request], began: float, ended: float) -> Coroutine[None, None, None]:
        """Reports requests of different models that were executed together, before their answers. `began`, `ended`: Unix times. Returns what
        counts them, which their answers need not wait for."""
        counts = {"learner": Counter({"busy_seconds": ended - began})}
        for place, request in requests.items():
            step = self.meters.executed(place.lane, request.fields.get(ARRIVED, began), began, ended)
            if step is not None:
                await self._records.add_step(place.lane, place.seq, step)
            tokens = self.meters.take_tokens(place.lane)
            counts.setdefault(tenant_in(place.lane), Counter()).update(trained_tokens=tokens, steps=int(step is not None))
        return self._records.count(counts)

    async def unloaded(self, model: str, seq: int) -> None:
        """Reports the end of a model."""
        self.meters.forget(model)
        await self._records.add_step(model, seq, StageDone(step=0, hf_path=""))
