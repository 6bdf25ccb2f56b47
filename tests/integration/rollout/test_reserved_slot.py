"""vLLM's own schedulers with a reserved slot: urgent requests wait for no ordinary one, and the ordinary ones keep their limit."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_rollout.engine.reserved_slot import reserve_slot
from polyreme_rollout.engine.vllm_arguments import CPU_BLOCK_TOKENS, engine_arguments
from support.models import tiny_model
from support.replicas import rollout_config

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]  # it imports vLLM

SLOTS, CONTEXT, FEW_STEPS = 3, 128, 4
ROOMY = 64
"""Blocks for all requests that run at once."""
TIGHT = 1 + CONTEXT // CPU_BLOCK_TOKENS
"""Blocks for one request of full length. vLLM keeps one block for itself."""


class Engine:
    """A scheduler whose model samples token 1. `in_flight`: steps that are planned before the first one's result is known."""

    def __init__(self, vllm_config: Any, blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        spec = FullAttentionSpec(block_size=CPU_BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=CPU_BLOCK_TOKENS,
            hash_block_size=CPU_BLOCK_TOKENS,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(CPU_BLOCK_TOKENS, sha256)
        self.in_flight, self._results = int(bool(vllm_config.scheduler_config.async_scheduling)), deque[tuple[Any, Any]]()
        self.tokens: dict[str, int] = {}

    def add(self, id: str, prompt: int, new: int, priority: int = 0) -> None:
        """Ordinary prompts share their beginning; an urgent one shares nothing."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params, first = SamplingParams(max_tokens=new, ignore_eos=True), 3 if priority >= 0 else 200 * len(self.tokens)
        order: dict[str, Any] = {"arrival_time": len(self.tokens), "priority": priority}
        request = Request(id, list(range(first, first + prompt)), params, None, block_hasher=self._hasher, **order)
        self.tokens[id] = 0
        self.scheduler.add_request(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        preempted = {request.request_id: request.num_preemptions for request in self.scheduler.running}
        planned = self.scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        returned = [id for id in ids if id in preempted and self.scheduler.requests[id].num_preemptions > preempted[id]]
        assert returned == [], "preempted and planned in one step, which a model runner does not support"
        sampled = [[] if self.scheduler.requests[id].is_prefill_chunk else [1] for id in ids]
        places = {id: place for place, id in enumerate(ids)}
        self._results.append((planned, ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)))
        if len(self._results) > self.in_flight:
            for outputs in self.scheduler.update_from_output(*self._results.popleft()).values():
                for output in outputs.outputs:
                    self.tokens[output.request_id] += len(output.new_token_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "model")


def start(model: Path, blocks: int, asynchronous: bool, chunk: int | None = None) -> Engine:
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm = {"chunked_prefill": chunk is not None, "max_num_batched_tokens": chunk}
    config = rollout_config(model, max_model_len=CONTEXT, max_num_seqs=SLOTS, vllm=vllm)
    vllm_config = AsyncEngineArgs(**engine_arguments(config, model, True)).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = asynchronous
    reserve_slot(vllm_config.scheduler_config)
    return Engine(vllm_config, blocks)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_urgent_request_runs_beside_the_others(model: Path, asynchronous: bool) -> None:
    engine = start(model, ROOMY, asynchronous)
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
    engine = start(model, TIGHT, asynchronous)
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

    engine = start(model, TIGHT, asynchronous=False)
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
    engine, expected, waited = start(model, blocks, asynchronous, chunk), dict[str, int](), dict[str, int]()

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
