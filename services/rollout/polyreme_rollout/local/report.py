"""What the sampler of a training service tells the observer: the answers of each model, and how busy it is.

Invariant: a report changes no answer, and follows it, so that a request that is executed again is reported once or not at all.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme.experience.service_records import SampledAnswer, SampledGroup, ServiceRecords

_DIGITS = 5
_TOKEN_BYTES = 4
_MOST_WAITING, _LONGEST_SECONDS = 256, 2.0


class ReportedAnswer(NamedTuple):
    """An answer that is not reported yet. began, seconds: Unix time at which sampling began, and how long it took."""

    place: LogPlace
    weights: str | None
    prompt: Sequence[int]
    began: float
    seconds: float
    answer: pb.SampleResponse


class SamplerReport:
    """Adds records and counters, once nothing is sampled or `is_due`: to make and to store them takes as much time as to answer.

    Args:
        decode: token ids -> text, special tokens included.
    """

    def __init__(self, records: ServiceRecords, decode: Callable[[Sequence[int]], str]) -> None:
        self._records, self._decode = records, decode
        self._running, self._since, self._busy = 0, 0.0, 0.0
        self._waiting: list[ReportedAnswer] = []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Measures the time of the block once, whatever number of blocks runs at the same time. The next answer reports it."""
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            now = time.monotonic()
            self._busy += now - self._since
            self._since = now

    @property
    def is_due(self) -> bool:
        """Whether waiting answers must be sent also while others are sampled: there are many, or the oldest waits too long."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return len(self._waiting) >= _MOST_WAITING or time.time() - first.began - first.seconds >= _LONGEST_SECONDS

    def add(self, place: LogPlace, weights: str | None, prompt: Sequence[int], began: float, answer: pb.SampleResponse) -> None:
        """Adds an answer to those that wait. Those of the base model are counted only.

        Args:
            weights: the directory of the saved model.
            began: Unix time at which sampling began.
        """
        self._waiting.append(ReportedAnswer(place, weights, prompt, began, time.time() - began, answer))

    async def send(self) -> None:
        """Reports the answers that wait. Raises StoreError."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        busy, self._busy = self._busy, 0.0
        counts: dict[str, Counter[str]] = {}
        for each in waiting:
            sampled = sum(len(sequence.tokens) // _TOKEN_BYTES for sequence in each.answer.sequences)
            counts.setdefault(tenant_in(each.place.id), Counter()).update(prompt_tokens=len(each.prompt), sampled_tokens=sampled)
        await self._records.count({**counts, "sampler": {"busy_seconds": busy}})
        for each in waiting:
            if each.weights is not None:
                path = Path(each.weights)
                answers = [self._answer(sequence) for sequence in each.answer.sequences]
                text, name = self._decode(each.prompt), f"{path.parent.name}/{path.name}"
                group = SampledGroup(name, text, len(each.prompt), each.began, each.seconds, answers)
                await self._records.add_sampled(path.parents[1].name, group)

    def _answer(self, sequence: pb.SampledSequence) -> SampledAnswer:
        ids = np.frombuffer(sequence.tokens, "<i4").tolist()
        logprobs = np.frombuffer(sequence.logprobs, "<f4").astype(np.float64).round(_DIGITS).tolist()
        reason = "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length"
        return SampledAnswer(self._decode(ids), ids, logprobs, reason)
