"""What the learner tells the observer.

Invariant: a report changes no result. The record of an optimizer step comes with its answer.
"""

from collections import Counter
from collections.abc import Coroutine, Mapping

from polyreme.experience.metric_records import MetricRecord, StageDone
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme.experience.service_records import ServiceRecords
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.wire import ARRIVED, Request


class LearnerReport:
    """Adds records and counters. `meters` measures the requests of models."""

    def __init__(self, records: ServiceRecords) -> None:
        self._records, self.meters = records, StepMeters()

    def executed(
        self, requests: Mapping[LogPlace, Request], began: float, ended: float
    ) -> tuple[Mapping[LogPlace, MetricRecord], Coroutine[None, None, None]]:
        """The records of the optimizer steps among requests of different models that were executed together, and what counts
        them, which their answers need not wait for. `began`, `ended`: Unix times."""
        counts, records = {"learner": Counter({"busy_seconds": ended - began})}, dict[LogPlace, MetricRecord]()
        for place, request in requests.items():
            step = self.meters.executed(place.lane, request.fields.get(ARRIVED, began), began, ended)
            if step is not None:
                records[place] = step
            tokens = self.meters.take_tokens(place.lane)
            counts.setdefault(tenant_in(place.lane), Counter()).update(trained_tokens=tokens, steps=int(step is not None))
        return records, self._records.count(counts)

    def unloaded(self, model: str) -> MetricRecord:
        """The record of the end of a model."""
        self.meters.forget(model)
        return StageDone(step=0, hf_path="")
