"""The messages of a call: few enough for one process, also while thousands of calls run."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.generation.generate import LEAST_GATHER, MESSAGES_PER_SECOND, MOST_GATHER, gather_seconds
from polyreme_trainer.orchestrator.replicas.straggler_detection import SILENCE_TIMEOUT


@given(st.integers(0, 100_000))
def test_a_call_gathers_longer_when_more_calls_run(calls: int) -> None:
    seconds = gather_seconds(calls)
    assert LEAST_GATHER <= seconds <= MOST_GATHER < SILENCE_TIMEOUT
    assert seconds <= gather_seconds(calls + 1)
    assert seconds == MOST_GATHER or calls <= 1.001 * MESSAGES_PER_SECOND * seconds
