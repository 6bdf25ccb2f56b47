"""The partial rollouts that an orchestrator saves in the log, and from which its successor continues."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import experience_pb2, rollout_pb2
from polyreme_trainer.orchestrator.generation.rollout_parts import PartialRolloutError, join_parts, part_since
from support.chunks import chunk, rollouts

PROMPT = np.array([5, 6, 7], np.int32)


def end(slot: int, length: int) -> rollout_pb2.GenerateResponse:
    spans = [{"version": 1, "start": 0, "end": length}]
    return rollout_pb2.GenerateResponse(
        ends=[rollout_pb2.SlotEnd(slot=slot, finish_reason=experience_pb2.FINISH_REASON_LENGTH, spans=spans)]
    )


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 1), st.lists(st.integers(2, 40), min_size=1, max_size=9)), st.none()), max_size=12
    )
)
def test_parts_make_up_the_drafts_whenever_they_are_cut(steps: list[tuple[int, list[int]] | None]) -> None:
    there = rollouts(max_new=1000)
    parts: list[bytes] = []
    marks = there.marks()
    for step in steps:
        if step:
            there.add(chunk(step[0], step[1], len(parts)))
        else:
            parts.append(part_since(marks, there, PROMPT))
            marks = there.marks()
    if there.samples[0].length:
        there.add(end(0, there.samples[0].length))
    parts.append(part_since(marks, there, PROMPT))
    again = join_parts(parts, PROMPT, rollouts(max_new=1000))
    for before, after in zip(there.samples, again.samples, strict=True):
        assert (before.ids, before.logprobs, before.spans, before.finish_reason) == (
            after.ids, after.logprobs, after.spans, after.finish_reason,
        )  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    there = rollouts()
    there.add(chunk(0, [9] * 20))
    part = part_since(rollouts().marks(), there, PROMPT)
    for prompt, blank in ((PROMPT + 1, rollouts()), (PROMPT, rollouts(count=3)), (PROMPT, rollouts(max_new=19))):
        with pytest.raises(PartialRolloutError):
            join_parts([part], prompt, blank)
    with pytest.raises(PartialRolloutError):
        join_parts([part, part], PROMPT, rollouts())  # its spans start at 0 again


def test_a_takeover_credits_a_finished_sample_to_no_further_replica() -> None:
    there = rollouts()
    there.add(chunk(0, [9] * 20))
    there.add(end(0, 20))
    there.credit("before")
    again = join_parts([part_since(rollouts().marks(), there, PROMPT)], PROMPT, rollouts())
    again.start_call()
    again.add(chunk(1, [9] * 3))
    again.credit("after")
    assert [sample.replicas for sample in again.samples] == [["before"], ["after"]]
