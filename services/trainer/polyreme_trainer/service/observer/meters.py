"""What each model's requests cost and gave, from one optimizer step to the next.

Invariant: pure. The times of a step add up to the time since the step before: executing, in the queue, and without a request.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from polyreme.experience.metric_records import StageStep
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme_trainer.service.batch import Batch
from polyreme_trainer.service.wire import ARRIVED, Request

_TRAINED = ("weights", "advantages", "mask")
"""Inputs of losses that are 0 for a token that is not trained on. The first one that a loss has counts."""


@dataclass
class _Meter:
    loss: float = 0.0
    tokens: int = 0
    trained: int = 0
    sequences: int = 0
    execute: float = 0.0
    queue: float = 0.0
    client: float = 0.0


class StepMeters:
    """The meters of all models."""

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}
        self._ended: dict[str, float] = {}
        self._moved: dict[str, tuple[_Meter, Mapping[str, float]]] = {}
        self._tokens: dict[str, int] = {}

    def add_batch(self, model: str, batch: Batch, loss: float) -> None:
        """Counts a batch whose gradient is in the next optimizer step."""
        meter, tokens = self._meters.setdefault(model, _Meter()), sum(map(len, batch.inputs))
        self._tokens[model] = self._tokens.get(model, 0) + tokens
        meter.loss += loss
        meter.tokens += tokens
        meter.sequences += len(batch.inputs)
        meter.trained += int(np.count_nonzero(next(batch.columns[name] for name in _TRAINED if name in batch.columns)))

    def add_step(self, model: str, norm: float, lr: float, steps: int) -> None:
        """Counts an optimizer step, which ends what the meter measures. `steps`: of the optimizer."""
        self._moved[model] = self._meters.pop(model, _Meter()), {"grad_norm": norm, "lr": lr, "optimizer_steps": float(steps)}

    def drop_gradient(self, model: str) -> None:
        """Forgets the batches of a gradient that was dropped. Their time counts for the next step."""
        if (meter := self._meters.get(model)) is not None:
            self._meters[model] = _Meter(execute=meter.execute, queue=meter.queue, client=meter.client)

    @contextmanager
    def replaying(self, model: str) -> Iterator[None]:
        """What the block executes again counts for the next optimizer step alone, and only if this process has not counted it."""
        counted = self._meters.pop(model, None)
        yield
        if counted is not None:
            self._meters[model] = counted
        self._moved.pop(model, None)
        self._tokens.pop(model, None)

    def take_tokens(self, model: str) -> int:
        """The tokens of the batches since the last call."""
        return self._tokens.pop(model, 0)

    def executed(self, model: str, arrived: float, began: float, ended: float) -> StageStep | None:
        """Counts the times of a request, in Unix seconds. Returns the record of the optimizer step that it was."""
        moved = self._moved.pop(model, None)
        meter = moved[0] if moved else self._meters.setdefault(model, _Meter())
        free = self._ended.get(model, arrived)
        waited_from = min(max(arrived, free), began)
        meter.client += max(0.0, waited_from - free)
        meter.queue += began - waited_from
        meter.execute += ended - began
        self._ended[model] = ended
        return None if moved is None else StageStep(step=0, time=ended, metrics={**_metrics(meter), **moved[1]})

    def report(
        self, requests: Mapping[LogPlace, Request], began: float, ended: float
    ) -> tuple[dict[LogPlace, StageStep], dict[str, Counter[str]]]:
        """The records of the optimizer steps among requests of different models that were executed together, and what they add to
        the service's counters. `began`, `ended`: Unix times."""
        records, counts = dict[LogPlace, StageStep](), {"learner": Counter({"busy_seconds": ended - began})}
        for place, request in requests.items():
            step = self.executed(place.lane, request.fields.get(ARRIVED, began), began, ended)
            if step is not None:
                records[place] = step
            tokens = self.take_tokens(place.lane)
            counts.setdefault(tenant_in(place.lane), Counter()).update(trained_tokens=tokens, steps=int(step is not None))
        return records, counts

    def forget(self, model: str) -> None:
        """Forgets an unloaded model."""
        for kept in (self._meters, self._ended, self._moved, self._tokens):
            kept.pop(model, None)


def _metrics(meter: _Meter) -> dict[str, float]:
    seconds = meter.execute + meter.queue + meter.client
    return {
        "loss": meter.loss / max(1, meter.trained),
        "loss_sum": meter.loss,
        "sequences": meter.sequences,
        "tokens": meter.tokens,
        "trained_tokens": meter.trained,
        "tokens_per_second": meter.tokens / seconds if seconds else 0.0,
        "time/step": seconds,
        "time/execute": meter.execute,
        "time/queue": meter.queue,
        "time/client": meter.client,
    }
