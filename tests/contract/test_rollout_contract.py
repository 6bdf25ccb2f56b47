"""The contract of every rollout engine behind the service: the simulated one in this process, and vLLM through the real command."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from polyreme import API_VERSION
from polyreme.api.v1 import experience_pb2, rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from polyreme.net import rpc
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import TensorSpec, plan_manifest
from polyreme_rollout.generation.requests import RequestLimits
from polyreme_rollout.generation.running import RunningSequences
from polyreme_rollout.generation.service import Identity, RolloutService
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine, routes_of
from polyreme_rollout.weights.weight_swap import WeightSwapper
from polyreme_rollout.weights.weights_service import WeightsService
from support.models import tiny_model
from support.replicas import Learner, generate, hf_weights, replica, request, rollout_config

PROMPT = [5, 6, 7, 8, 9]
STOP, LENGTH = experience_pb2.FINISH_REASON_STOP, experience_pb2.FINISH_REASON_LENGTH


@dataclass
class World:
    """A replica that serves version 1."""

    run_id: str
    rollout: Any
    weights: Any
    learner: Learner
    arrays: dict[str, np.ndarray]

    def ask(self, slots: list[tuple[int, list[int], int, int]], **options: Any) -> rollout_pb2.GenerateRequest:
        return request(self.run_id, PROMPT, slots, **options)

    async def generate(self, slots: list[tuple[int, list[int], int, int]], **options: Any) -> Any:
        return await generate(self.rollout, self.ask(slots, **options))

    async def outstanding(self) -> int:
        return int((await self.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)).outstanding_tokens)

    async def push(self, version: int, factor: float) -> Any:
        arrays = {name: array * factor for name, array in self.arrays.items()}
        return await self.learner.push(self.weights, version, arrays)


@asynccontextmanager
async def simulated(run_id: str) -> AsyncIterator[tuple[Any, Any, Learner, dict[str, np.ndarray]]]:
    arrays = {"w": np.arange(64, dtype="<f4")}
    layout = plan_manifest([TensorSpec("w", "F32", (64,))])
    learner = Learner(run_id, layout, Arena.create(run_id, layout.nbytes))
    engine = SimulatedInferenceEngine(
        frozenset(arrays), max_model_len=128, vocab_size=45, step_seconds=0.005, max_num_seqs=8, route_bytes=6
    )
    metrics, limits = ReplicaMetrics(), RequestLimits(128, 45, max_sequences=40)
    running = RunningSequences(metrics)
    swapper = WeightSwapper(run_id, engine, lambda: 0, running.change_policy, running.lose_policy)
    service = RolloutService(engine, Identity(run_id, "here", "f"), limits, metrics, swapper, running)

    async def announce() -> None:
        pass

    def add(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(WeightsService(swapper, metrics, announce), server)

    async with rpc.serve("127.0.0.1", 0, add, [], grace=0.1) as server, rpc.connect(f"127.0.0.1:{server.port}") as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel), weights_pb2_grpc.WeightsServiceStub(channel), learner, arrays
        await asyncio.wait_for(running.drained(), 300)


@asynccontextmanager
async def real(run_id: str, redis_url: str, folder: Path) -> AsyncIterator[tuple[Any, Any, Learner, dict[str, np.ndarray]]]:
    model = tiny_model("tied", folder / "model", hidden_size=128)
    config = rollout_config(model, max_num_seqs=4)
    async with replica(redis_url, run_id, model, folder / "replica.log", config) as there:
        yield there.rollout, there.weights, Learner.of(run_id, model), hf_weights(model)


@pytest_asyncio.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.real)], scope="module", loop_scope="module")
async def world(request: Any, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    made = simulated(run_id) if request.param == "simulated" else real(run_id, redis_url, tmp_path_factory.mktemp("real"))
    async with made as (rollout, weights, learner, arrays):
        there = World(run_id, rollout, weights, learner, arrays)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await there.generate([(0, [], 1, 0)])
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "found none" in refused.value.details()
        await there.push(1, 1.0)
        yield there
        learner.arena.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_greedy_slots_of_a_group_agree_and_a_prefix_is_continued(world: World) -> None:
    answers = await world.generate([(0, [], 40, 1), (7, [], 40, 2)])
    assert answers[0].ids == answers[7].ids
    assert len(answers[0].ids) == len(answers[0].logprobs) == 40
    rest = await world.generate([(3, answers[0].ids[:17], 23, 9)])
    assert rest[3].ids == answers[0].ids[17:]
    assert rest[3].spans == [(world_version(rest[3]), 0, 23)]


async def test_chunks_of_a_call_share_messages(world: World) -> None:
    call = world.rollout.Generate(world.ask([(i, [], 64, i) for i in range(4)], temperature=1.0))
    messages = [message async for message in call]
    chunks = [chunk for message in messages for chunk in message.chunks]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4 * 4 * 64
    assert len(messages) <= len(chunks) / 2
    assert sum(len(message.ends) for message in messages) == 4


async def test_chunks_are_large_and_lengths_exact(world: World) -> None:
    answers = await world.generate([(i, [], length, i) for i, length in enumerate((1, 15, 16, 17, 50))], temperature=1.0)
    for answer, length in zip(answers.values(), (1, 15, 16, 17, 50), strict=True):
        assert len(answer.ids) == len(answer.logprobs) == length
        assert all(size >= 16 for size in answer.chunk_lengths[:-1])
        assert answer.finish == LENGTH
        assert all(value <= 0 for value in answer.logprobs)


async def test_routes_are_reported_for_every_token_or_for_none(world: World) -> None:
    """vLLM on CPU reports none. A continued sequence reports the routes of its new tokens."""
    described = await world.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)
    for prefix in ([], [5, 6, 7]):
        call = world.rollout.Generate(world.ask([(0, prefix, 40, 0)], temperature=1.0))
        chunks = [chunk async for message in call for chunk in message.chunks]
        ids = [token for chunk in chunks for token in np.frombuffer(chunk.token_ids, "<i4").tolist()]
        routes = b"".join(chunk.routes for chunk in chunks)
        assert len(ids) == 40 and routes == (routes_of(ids, 6) if described.engine == "simulated" else b"")


async def test_a_stop_token_is_kept_as_the_last(world: World) -> None:
    whole = (await world.generate([(0, [], 40, 0)]))[0]
    stop = whole.ids[20]
    end = whole.ids.index(stop)
    stopped = (await world.generate([(0, [], 40, 0)], stop_token_ids=[stop]))[0]
    assert stopped.ids == whole.ids[: end + 1]
    assert stopped.logprobs == pytest.approx(whole.logprobs[: end + 1], abs=1e-5)
    assert stopped.finish == STOP
    assert stopped.spans[-1][2] == end + 1


async def test_a_seed_repeats_a_sample_and_seeds_differ(world: World) -> None:
    slots = [(0, [], 48, 11), (1, [], 48, 12), (2, [], 48, 2**64 - 1)]
    first = await world.generate(slots, temperature=1.0)
    again = await world.generate(slots, temperature=1.0)
    assert [first[i].ids for i in range(3)] == [again[i].ids for i in range(3)]
    assert first[0].ids != first[1].ids


@pytest.mark.parametrize(
    ("slots", "options", "code", "text"),
    [
        ([(0, [], 124, 0)], {}, grpc.StatusCode.INVALID_ARGUMENT, "max_new 124 = 129"),
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "at least one sequence"),
        ([(0, [], 4, 0)], {"stop_token_ids": [45]}, grpc.StatusCode.INVALID_ARGUMENT, "stop token ids"),
        ([(0, [], 4, 0)], {"min_version": 10**6}, grpc.StatusCode.FAILED_PRECONDITION, "version 1000000 or newer"),
    ],
)
async def test_refusals(world: World, slots: Any, options: Any, code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.generate(slots, **options)
    assert refused.value.code() == code
    assert text in refused.value.details()


async def test_a_full_queue_refuses(world: World) -> None:
    """The limits are 40 sequences (simulated) and 16 x max_num_seqs = 64 (vLLM). The test requests 80 at once."""
    calls = [asyncio.ensure_future(world.generate([(i, [], 120, i) for i in range(10)], temperature=1.0)) for _ in range(8)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in outcomes if isinstance(error, grpc.aio.AioRpcError)]
    assert all(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED for error in refused)
    assert 4 <= len(outcomes) - len(refused) < 8


async def test_the_whole_context_can_be_filled(world: World) -> None:
    assert len((await world.generate([(0, [], 123, 0)]))[0].ids) == 123


async def test_cancelling_a_call_ends_its_work(world: World) -> None:
    stream = world.rollout.Generate(world.ask([(i, [], 120, i) for i in range(32)], temperature=1.0), timeout=300)
    async with asyncio.timeout(300):
        while not await world.outstanding():  # noqa: ASYNC110 - it asks a server; a message may come when all is done
            await asyncio.sleep(0.001)
    stream.cancel()
    async with asyncio.timeout(300):
        while await world.outstanding():  # noqa: ASYNC110 - it asks a server
            await asyncio.sleep(0.01)


async def test_sequences_survive_a_swap_and_say_where_it_was(world: World) -> None:
    """A swap may come before the first tokens or after the last ones, which depends on the machine, so the test tries several moments."""
    for attempt in range(30):
        responses, before = await swapped_generation(world, 0.02 * 1.25**attempt)
        ends = sorted((end for response in responses for end in response.ends), key=lambda end: end.slot)
        assert [end.slot for end in ends] == [0, 1]
        assert all((end.spans[0].start, end.spans[-1].end) == (0, 120) for end in ends)
        if all(len(end.spans) > 1 for end in ends):
            break
    for end in ends:
        assert [span.version for span in end.spans] == [before, before + 1]
        assert end.spans[0].end == end.spans[1].start
    oldest = [chunk.oldest_version for response in responses for chunk in response.chunks if chunk.slot == 0]
    assert oldest == sorted(oldest)
    assert oldest[0] == before
    after = (await world.generate([(0, [], 20, 0)]))[0]
    assert after.spans == [(before + 1, 0, 20)]


async def swapped_generation(world: World, seconds: float) -> tuple[list[rollout_pb2.GenerateResponse], int]:
    """Generates two sequences of 120 tokens, and commits the next version `seconds` later. Also returns the version before."""
    before = (await world.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)).version
    staging = world.learner.write(before + 1, {name: array * 1.5 for name, array in world.arrays.items()})
    await world.weights.StageArena(staging, timeout=300)
    call = world.rollout.Generate(world.ask([(0, [], 120, 3), (1, [], 120, 4)], temperature=1.0), timeout=300)
    await asyncio.sleep(seconds)
    committed = await world.weights.Commit(weights_pb2.CommitRequest(id=staging.manifest.id), timeout=300)
    assert committed.version == before + 1
    return [response async for response in call], before


async def test_what_a_version_with_a_failed_canary_has_sampled_is_never_delivered(world: World) -> None:
    before = (await world.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)).version
    staging = world.learner.write(before + 1, {name: array * 1.5 for name, array in world.arrays.items()})
    await world.weights.StageArena(staging, timeout=300)
    stream = aiter(world.rollout.Generate(world.ask([(i, [], 120, i) for i in range(8)], temperature=1.0), timeout=300))
    responses = [await anext(stream)]
    canary = weights_pb2.Canary(ids=PROMPT, logprobs=[-50.0] * (len(PROMPT) - 1), limit=1.0)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await world.weights.Commit(weights_pb2.CommitRequest(id=staging.manifest.id, canary=canary), timeout=300)
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert "canary" in failed.value.details()
    with suppress(grpc.aio.AioRpcError):  # it may have ended before
        async for response in stream:
            responses.append(response)
    assert {chunk.oldest_version for response in responses for chunk in response.chunks} == {before}
    assert {span.version for response in responses for end in response.ends for span in end.spans} <= {before}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.generate([(0, [], 1, 0)])
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    await world.push(before + 2, 1.0)
    assert (await world.generate([(0, [], 1, 0)]))[0].spans == [(before + 2, 0, 1)]


async def test_describe(world: World) -> None:
    answer = await world.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)
    assert (answer.run_id, answer.api, answer.has_version, answer.quarantined) == (world.run_id, API_VERSION, True, False)
    assert answer.max_model_len == 128
    assert answer.outstanding_tokens == 0
    assert answer.engine


async def test_damaged_weights_and_stale_terms_change_nothing(world: World) -> None:
    before = (await world.generate([(0, [], 20, 0)]))[0].ids
    version = (await world.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)).version
    staging = world.learner.write(version + 1, world.arrays)
    staging.manifest.tensors[0].digest ^= 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.weights.StageArena(staging, timeout=300)
    assert refused.value.code() == grpc.StatusCode.DATA_LOSS
    staging.manifest.id.term = 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.weights.StageArena(staging, timeout=300)
    assert refused.value.code() == grpc.StatusCode.ABORTED
    id = weights_pb2.VersionId(run_id=world.run_id, term=world.learner.term, version=version + 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.weights.Commit(weights_pb2.CommitRequest(id=id), timeout=300)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert (await world.generate([(0, [], 20, 0)]))[0].ids == before


async def test_an_arena_that_cannot_be_mapped_is_reported(world: World) -> None:
    probe = weights_pb2.ProbeRequest(run_id=world.run_id, term=world.learner.term, arena_path="/dev/shm/none", nonce=b"x" * 16)
    answer = await world.weights.Probe(probe, timeout=300)
    assert not answer.can_map
    assert "/dev/shm/none" in answer.reason
    probe.arena_path = str(world.learner.arena.path)
    answer = await world.weights.Probe(probe, timeout=300)
    assert not answer.can_map
    assert "nonce" in answer.reason


def world_version(answer: Any) -> int:
    return int(answer.spans[0][0])
