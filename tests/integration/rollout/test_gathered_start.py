"""vLLM's own schedulers with `GatheredStart`: what arrives together at an idle engine starts together, and nothing waits for long."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_rollout.engine.scheduler import LONGEST_WAIT_SECONDS, QUIET_SECONDS
from support.models import tiny_model
from support.vllm_scheduler import ROOMY, start_scheduler

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]  # it imports vLLM

LOOP_SECONDS = 0.001
"""vLLM's loop calls the scheduler this often while nothing runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_follow_each_other_start_in_one_step(model: Path, asynchronous: bool) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous)
    for name in "abc":
        engine.add(name, 5, 4)
        engine.step_now()
        engine.now += QUIET_SECONDS * 0.9
        assert engine.running == []
    engine.now += QUIET_SECONDS
    engine.step_now()
    assert engine.running == ["a", "b", "c"]


def test_an_engine_starts_although_requests_keep_coming(model: Path) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous=False)
    most = round(LONGEST_WAIT_SECONDS / (QUIET_SECONDS / 2)) + 1
    for number in range(most):
        assert engine.running == []
        engine.add(str(number), 5, 4)
        engine.step_now()
        engine.now += QUIET_SECONDS / 2
    engine.step_now()
    assert engine.running


def test_each_idle_time_gathers_anew(model: Path) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous=False)
    for name in "ab":
        engine.add(name, 5, 1)
        engine.step_now()
        assert not engine.tokens[name]
        engine.step()
        assert engine.tokens[name] == 1


def test_a_working_engine_takes_a_request_at_once(model: Path) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous=False)
    engine.add("a", 5, 4)
    engine.step()
    engine.add("b", 5, 4)
    engine.step_now()
    assert engine.running == ["a", "b"]


def test_a_request_after_a_pause_waits_no_longer_than_before_it(model: Path) -> None:
    from vllm.v1.core.sched.interface import PauseState

    engine = start_scheduler(model, ROOMY, asynchronous=False)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.add("a", 5, 4)
    engine.step_now()
    engine.now += QUIET_SECONDS
    engine.step_now()
    assert engine.running == []
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step_now()
    assert engine.running == ["a"]


@settings(max_examples=60, deadline=None)
@given(
    asynchronous=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.floats(0, 2 * QUIET_SECONDS), st.integers(1, 40), st.integers(1, 30), st.sampled_from([0, 0, -1])),
        min_size=1,
        max_size=30,
    ),
)
def test_any_arrivals(model: Path, asynchronous: bool, arrivals: list[tuple[float, int, int, int]]) -> None:
    """Arrivals: seconds since the one before, tokens of the prompt, tokens to sample, priority. A step takes one pass of vLLM's loop."""
    engine, expected, idle = start_scheduler(model, ROOMY, asynchronous), dict[str, int](), 0.0

    def step() -> None:
        nonlocal idle
        engine.step_now()
        engine.now += LOOP_SECONDS
        idle = 0.0 if engine.running or not len(engine.scheduler.waiting) else idle + LOOP_SECONDS
        assert idle <= LONGEST_WAIT_SECONDS + 2 * LOOP_SECONDS

    for number, (after, prompt, new, priority) in enumerate(arrivals):
        arrival = engine.now + after
        while engine.now < arrival:
            step()
        engine.add(str(number), prompt, new, priority)
        expected[str(number)] = new
    for _ in range(10_000):
        if not engine.busy:
            break
        step()
    assert engine.tokens == expected
