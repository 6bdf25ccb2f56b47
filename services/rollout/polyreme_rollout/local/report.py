"""What the sampler of a training service tells the observer: the answers of each model, and how busy it is.

Invariant: a report changes no answer, and follows it, so that a request that is executed again is reported once or not at all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LogPlace, tenant_in
from polyreme.experience.service_records import SampledAnswer, SampledGroup, ServiceRecords

_DIGITS = 5


class SamplerReport:
    """Adds records and counters.

    Args:
        decode: token ids -> text, special tokens included.
    """

    def __init__(self, records: ServiceRecords, decode: Callable[[Sequence[int]], str]) -> None:
        self._records, self._decode = records, decode
        self._running, self._since, self._busy = 0, 0.0, 0.0

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

    async def answered(
        self, place: LogPlace, weights: str | None, prompt: Sequence[int], began: float, answer: pb.SampleResponse
    ) -> None:
        """Reports an answer. Those of the base model are counted only.

        Args:
            weights: the directory of the saved model.
            began: Unix time at which sampling began.
        """
        answers = [self._answer(each) for each in answer.sequences]
        tokens = {"prompt_tokens": len(prompt), "sampled_tokens": sum(len(each.token_ids) for each in answers)}
        busy, self._busy = self._busy, 0.0
        await self._records.count({"sampler": {"busy_seconds": busy}, tenant_in(place.id): tokens})
        if weights is not None:
            path = Path(weights)
            name = f"{path.parent.name}/{path.name}"
            group = SampledGroup(name, self._decode(prompt), len(prompt), began, time.time() - began, answers)
            await self._records.add_sampled(path.parents[1].name, group)

    def _answer(self, sequence: pb.SampledSequence) -> SampledAnswer:
        ids = np.frombuffer(sequence.tokens, "<i4").tolist()
        logprobs = np.frombuffer(sequence.logprobs, "<f4").astype(np.float64).round(_DIGITS).tolist()
        reason = "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length"
        return SampledAnswer(self._decode(ids), ids, logprobs, reason)
