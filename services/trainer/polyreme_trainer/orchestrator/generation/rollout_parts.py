"""Partial rollouts as parts in the experience log.

Invariant: joined in order, the parts of a group's samples are these samples as they were when the last part was made.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from polyreme.api.v1 import experience_pb2
from polyreme_trainer.orchestrator.generation.partial_rollouts import Mark, PartialRollout, PartialRollouts, covers


class PartialRolloutError(Exception):
    """Stored parts do not fit the current request."""


class RolloutParts:
    """The samples of one prompt, as a `Recoverable`.

    Args:
        prompt_ids: int32 [p].
    """

    def __init__(self, prompt_ids: np.ndarray, rollouts: PartialRollouts) -> None:
        self._prompt_ids, self.rollouts = prompt_ids, rollouts

    @property
    def cuts(self) -> int:
        return self.rollouts.cuts

    def mark(self) -> list[Mark]:
        return self.rollouts.marks()

    def part_since(self, mark: list[Mark] | None) -> bytes:
        return part_since(mark or [(0, 0)] * len(self.rollouts.samples), self.rollouts, self._prompt_ids)

    def restore(self, parts: Sequence[bytes]) -> None:
        join_parts(parts, self._prompt_ids, self.rollouts)


def part_since(marks: Sequence[Mark], rollouts: PartialRollouts, prompt_ids: np.ndarray) -> bytes:
    """A serialized Group with what arrived since `marks`: new ids and log-probabilities, and all spans of changed samples."""
    part = experience_pb2.Group(prompt_ids=prompt_ids.astype("<i4").tobytes())
    for sample, mark in zip(rollouts.samples, marks, strict=True):
        if mark == (sample.length, sample.finish_reason):
            part.samples.add()
            continue
        part.samples.add(
            token_ids=bytes(sample.ids[4 * mark[0] :]),
            logprobs=bytes(sample.logprobs[4 * mark[0] :]),
            routes=bytes(sample.routes[sample.route_bytes * mark[0] :]),
            finish_reason=sample.finish_reason,
            spans=[experience_pb2.VersionSpan(version=version, start=start, end=end) for version, start, end in sample.spans],
            replicas=sample.replicas,
        )
    return part.SerializeToString()


def join_parts(parts: Iterable[bytes], prompt_ids: np.ndarray, blank: PartialRollouts) -> PartialRollouts:
    """The partial rollouts that the parts contain. They replace the samples of `blank`, which bounds their number and length.

    Raises:
        PartialRolloutError: another prompt, another number of samples, too many tokens, or inconsistent parts.
    """
    prompt, samples = prompt_ids.astype("<i4").tobytes(), [PartialRollout(sample.index) for sample in blank.samples]
    for payload in parts:
        part = experience_pb2.Group.FromString(payload)
        if part.prompt_ids != prompt or len(part.samples) != len(samples):
            raise PartialRolloutError("expected partial rollouts of this prompt's samples; found others")
        for sample, new in zip(samples, part.samples, strict=True):
            if new.token_ids or new.finish_reason:
                sample.ids += new.token_ids
                sample.logprobs += new.logprobs
                sample.routes += new.routes
                sample.spans = [(span.version, span.start, span.end) for span in new.spans]
                sample.finish_reason = new.finish_reason
                sample.replicas = list(new.replicas)
    for sample in samples:
        if (
            sample.length > blank.max_new
            or len(sample.ids) != len(sample.logprobs)
            or len(sample.routes) != sample.length * sample.route_bytes
            or not covers(sample.spans, 0, sample.length)
        ):
            raise PartialRolloutError(
                f"expected at most {blank.max_new} tokens with log-probabilities and spans; found other parts"
            )
    blank.samples = samples
    blank.drop_older()
    for sample in samples:
        sample.call_start = sample.length
    return blank
