"""vLLM's own schedulers with a reserved slot: urgent requests wait for no ordinary one, and the ordinary ones keep their limit."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import tiny_model
from support.vllm_scheduler import ROOMY, SLOTS, TIGHT, start_scheduler

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]  # it imports vLLM

FEW_STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_urgent_request_runs_beside_the_others(model: Path, asynchronous: bool) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous)
    for name in "abcd":
        engine.add(name, 5, 100)
    for _ in range(10):
        engine.step()
    assert engine.running == ["a", "b", "c"]
    engine.add("urgent", 32, 1, priority=-1)
    engine.step()
    assert engine.running[:3] == ["a", "b", "c"]
    for _ in range(engine.in_flight):
        engine.step()
    assert engine.tokens["urgent"] == 1
    engine.step()
    assert engine.running == ["a", "b", "c"]
    while engine.busy:
        engine.step()
    assert engine.tokens == {"a": 100, "b": 100, "c": 100, "d": 100, "urgent": 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_cache_makes_room_at_the_cost_of_the_latest_request(model: Path, asynchronous: bool) -> None:
    engine = start_scheduler(model, TIGHT, asynchronous)
    engine.add("first", 90, 30)
    engine.add("latest", 5, 30)
    for _ in range(3):
        engine.step()
    assert (engine.running, engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) == (["first", "latest"], 0)
    engine.add("urgent", 32, 1, priority=-1)
    for _ in range(FEW_STEPS):
        engine.step()
    assert engine.tokens["urgent"] == 1 and engine.tokens["first"] < 30
    assert [engine.scheduler.requests[id].num_preemptions for id in ("first", "latest")] == [0, 1]
    while engine.busy:
        engine.step()
    assert engine.tokens == {"first": 30, "latest": 30, "urgent": 1}


def test_a_paused_engine_preempts_nobody(model: Path) -> None:
    from vllm.v1.core.sched.interface import PauseState

    engine = start_scheduler(model, TIGHT, asynchronous=False)
    engine.add("a", 90, 30)
    engine.add("b", 5, 30)
    engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    engine.add("urgent", 32, 1, priority=-1)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(FEW_STEPS):
        engine.step()
    assert engine.running == ["a", "b"]


@settings(max_examples=60, deadline=None)
@given(
    asynchronous=st.booleans(),
    blocks=st.integers(TIGHT, ROOMY),
    chunk=st.sampled_from([None, 8, 40]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(1, 88), st.sampled_from([0] * 4 + [1, -1])),
        min_size=6,
        max_size=20,
    ),
)
def test_any_load(
    model: Path, asynchronous: bool, blocks: int, chunk: int | None, arrivals: list[tuple[int, int, int, int]]
) -> None:
    """Arrivals: steps before it, tokens of the prompt, tokens to sample, priority; an urgent one samples one token."""
    engine, expected, waited = start_scheduler(model, blocks, asynchronous, chunk), dict[str, int](), dict[str, int]()

    def step() -> None:
        engine.step()
        assert sum(not id.startswith("urgent") for id in engine.running) <= SLOTS
        for id in list(waited):
            if engine.tokens[id]:
                del waited[id]
            else:
                waited[id] += 1
        # One urgent request at a time has the slot. Its prompt may need several chunks.
        chunks = 1 if chunk is None else -(-32 // (chunk - SLOTS))
        assert all(steps <= (FEW_STEPS + 2 * chunks) * (place + 1) for place, steps in enumerate(waited.values()))

    for number, (before, prompt, new, priority) in enumerate(arrivals):
        for _ in range(before):
            step()
        id = f"urgent-{number}" if priority < 0 else f"ordinary-{number}"
        prompt, new = (32, 1) if priority < 0 else (prompt, new)
        engine.add(id, prompt, new, priority)
        expected[id] = new
        if priority < 0:
            waited[id] = 0
    for _ in range(10_000):
        if not engine.busy:
            break
        step()
    assert engine.tokens == expected
