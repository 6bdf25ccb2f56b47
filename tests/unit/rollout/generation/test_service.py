"""Sequences that wait in the engine while the policy changes, of calls of their own and of calls on one stream."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import ArenaSource, Manifest, TensorSpec, plan_manifest
from polyreme_rollout.engine.protocol import CHUNK_TOKENS, EngineRequest, LoadResult, NewTokens
from polyreme_rollout.generation.requests import RequestLimits
from polyreme_rollout.generation.running import RunningSequences
from polyreme_rollout.generation.sequences import pack_ids
from polyreme_rollout.generation.service import Identity, RolloutService
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from polyreme_rollout.weights.staged_parts import VersionId
from polyreme_rollout.weights.weight_swap import WeightSwapper
from support.replicas import Learner
from support.waiting import until

LAYOUT = plan_manifest([TensorSpec("weight", "F32", (1,))])


class BusyEngine(SimulatedInferenceEngine):
    """An engine that samples nothing until `has_place` is set, delivers chunks after the first one when `may_go_on` is set, and loads when
    `may_load` is set.

    `asked` lists its requests.
    """

    def __init__(self) -> None:
        super().__init__(frozenset({"weight"}), max_model_len=64, vocab_size=100)
        self.asked: list[EngineRequest] = []
        self.has_place, self.may_go_on, self.may_load = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_go_on.set()
        self.may_load.set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        self.asked.append(request)
        await self.has_place.wait()
        async for new in super().generate(request):
            yield new
            await self.may_go_on.wait()

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        await self.may_load.wait()
        return await super().load(sources)


class Stream:
    """A stream of calls to a service."""

    def __init__(self, service: RolloutService) -> None:
        self._messages: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()
        self.responses = service.GenerateMany(self._requests(), CONTEXT)

    async def _requests(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while (message := await self._messages.get()) is not None:
            yield message

    def send(self, **fields: Any) -> None:
        self._messages.put_nowait(pb.GenerateManyRequest(**fields))

    def begin(self, *numbers: int, **fields: Any) -> None:
        self.send(requests=[pb.NumberedRequest(number=number, request=asked(**fields)) for number in numbers])

    def has_sent(self) -> bool:
        return self._messages.empty()

    def close(self) -> None:
        self._messages.put_nowait(None)

    async def statuses(self) -> dict[int, tuple[int, str]]:
        """Of each call, at the end of the stream."""
        answers = [answer async for message in self.responses for answer in message.responses]
        return {answer.number: (answer.status.code, answer.status.details) for answer in answers if answer.HasField("status")}


def asked(max_new: int = 20, **fields: Any) -> pb.GenerateRequest:
    slot = pb.Slot(index=0, max_new=max_new, seed=1)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=[])
    wanted = {"run_id": "run", "request_id": "r", "prompt_ids": pack_ids([3, 4]), "slots": [slot], "sampling": sampling}
    return pb.GenerateRequest(**{**wanted, **fields})


class Replica:
    """A service on a busy engine. `is_stream`: whether its calls are on a stream."""

    def __init__(self, learner: Learner, is_stream: bool) -> None:
        self.is_stream = is_stream
        metrics = ReplicaMetrics()
        self.engine, self.running, self._learner = BusyEngine(), RunningSequences(metrics), learner
        policy = self.running.change_policy, self.running.lose_policy
        self.swapper = WeightSwapper("run", self.engine, lambda: 1, *policy)
        limits = RequestLimits(64, 100, 8)
        self.service = RolloutService(
            self.engine, Identity("run", "replica", "model"), limits, metrics, self.swapper, self.running
        )

    async def serve(self, version: int) -> None:
        """Swaps a version in."""
        asked = self._learner.write(version, {"weight": np.array([version], "<f4")})
        await self.swapper.staging.stage(Manifest.from_proto(asked.manifest), asked.arena_path, asked.slot, asked.generation)
        await self.swapper.commit("run", VersionId(1, version))

    async def answer(self, max_new: int = 20, **versions: int) -> list[pb.GenerateResponse]:
        if not self.is_stream:
            return [response async for response in self.service.Generate(asked(max_new, **versions), CONTEXT)]
        stream = Stream(self.service)
        stream.begin(1, max_new=max_new, **versions)
        stream.close()
        async with aclosing(stream.responses):
            answers = [answer async for message in stream.responses for answer in message.responses]
        assert answers[-1].HasField("status")
        if status := answers[-1].status.code:
            raise Refused(next(code.name for code in grpc.StatusCode if code.value[0] == status), answers[-1].status.details)
        return [answer.response for answer in answers if answer.HasField("response")]


@pytest_asyncio.fixture(params=["call", "stream"])
async def replica(request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    """A replica that serves version 1."""
    arena = Arena.create(f"test-{uuid.uuid4().hex[:12]}", LAYOUT.nbytes)
    replica = Replica(Learner("run", LAYOUT, arena), request.param == "stream")
    await replica.serve(1)
    yield replica
    replica.engine.close()
    arena.close()


class Refused(Exception):
    """A call's status."""


class Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(code.name, text)


CONTEXT: Any = Context()


async def test_a_sequence_without_a_token_starts_anew_on_the_new_version(replica: Replica) -> None:
    engine = replica.engine
    answering = asyncio.create_task(replica.answer())
    await until(lambda: len(engine.asked) == 1)
    await replica.serve(2)
    await until(lambda: len(engine.asked) == 2)
    engine.has_place.set()
    responses = await asyncio.wait_for(answering, 300)
    assert engine.asked[0].request_id != engine.asked[1].request_id
    assert engine.asked[0].salt != engine.asked[1].salt
    [end] = [end for response in responses for end in response.ends]
    assert {span.version for span in end.spans} == {2}
    assert len(replica.running) == 0


async def test_a_sequence_with_tokens_continues_and_says_where_the_policy_changed(replica: Replica) -> None:
    engine = replica.engine
    answering = asyncio.create_task(replica.answer())
    await until(lambda: len(engine.asked) == 1)
    replica.running.change_policy(2, {engine.asked[0].request_id: 1})
    engine.has_place.set()
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start) for span in end.spans][:2] == [(1, 0), (2, 1)]


async def test_a_sequence_that_ended_before_the_policy_changed_keeps_its_version(replica: Replica) -> None:
    engine = replica.engine
    engine.has_place.set()
    engine.may_go_on.clear()
    answering = asyncio.create_task(replica.answer())
    await until(lambda: any(sequence.progress.sampled for sequence in replica.running))
    replica.running.change_policy(2, {})
    engine.may_go_on.set()
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start, span.end) for span in end.spans] == [(1, 0, 20)]


async def test_a_sequence_whose_tokens_wait_for_the_end_of_a_swap_keeps_its_version(replica: Replica) -> None:
    engine = replica.engine
    answering = asyncio.create_task(replica.answer(max_new=CHUNK_TOKENS))
    await until(lambda: len(engine.asked) == 1)
    engine.may_load.clear()
    swap = asyncio.create_task(replica.serve(2))
    await until(lambda: not replica.swapper.state.steady)
    engine.has_place.set()
    await until(lambda: any(sequence.progress.sampled for sequence in replica.running))
    assert not answering.done()
    engine.may_load.set()
    await swap
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start, span.end) for span in end.spans] == [(1, 0, CHUNK_TOKENS)]


async def test_a_cancelled_call_is_not_started_anew(replica: Replica) -> None:
    answering = asyncio.create_task(replica.answer())
    await until(lambda: len(replica.engine.asked) == 1)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await asyncio.wait_for(replica.running.drained(), 60)
    assert answering.cancelled() and len(replica.engine.asked) == 1


@pytest.mark.parametrize(
    ("asked", "served"),
    [({"min_version": 1}, True), ({"min_version": 2}, False), ({"exact_version": 1}, True)]
    + [({"exact_version": other}, False) for other in (0, 2)],
)
async def test_a_call_asks_for_a_version(replica: Replica, asked: dict[str, int], served: bool) -> None:
    replica.engine.has_place.set()
    if served:
        assert await replica.answer(**asked)
    else:
        with pytest.raises(Refused, match="found version 1") as refused:
            await replica.answer(**asked)
        assert refused.value.args[0] == "FAILED_PRECONDITION"
        assert not replica.engine.asked


async def test_a_call_for_one_version_ends_when_the_policy_changes(replica: Replica) -> None:
    answering = asyncio.create_task(replica.answer(exact_version=1))
    await until(lambda: len(replica.engine.asked) == 1)
    await replica.serve(2)
    with pytest.raises(Refused, match=r"version 1 .*version 2") as refused:
        await asyncio.wait_for(answering, 300)
    assert refused.value.args[0] == "FAILED_PRECONDITION"
    assert len(replica.running) == 0


async def test_tokens_that_gather_are_one_chunk_of_their_sequence(replica: Replica) -> None:
    replica.engine.has_place.set()
    [response] = await replica.answer(60, gather_ms=60_000)
    [chunk] = response.chunks
    assert (len(chunk.token_ids), len(chunk.logprobs), chunk.oldest_version) == (240, 240, 1)
    assert [(end.slot, [(span.start, span.end) for span in end.spans]) for end in response.ends] == [(0, [(0, 60)])]


@pytest.fixture
def stream(replica: Replica) -> Stream:
    return Stream(replica.service)


on_a_stream = pytest.mark.parametrize("replica", ["stream"], indirect=True)


@on_a_stream
async def test_each_call_of_a_stream_has_its_own_end(replica: Replica, stream: Stream) -> None:
    replica.engine.has_place.set()
    stream.begin(1)
    stream.begin(2, prompt_ids=pack_ids([100]))
    stream.begin(3, min_version=2)
    stream.begin(4)
    stream.close()
    statuses = await asyncio.wait_for(stream.statuses(), 300)
    assert [(number, code) for number, (code, _) in sorted(statuses.items())] == [(1, 0), (2, 3), (3, 9), (4, 0)]
    assert "vocabulary" in statuses[2][1] and "found version 1" in statuses[3][1]


@on_a_stream
async def test_a_call_of_a_stream_is_cancelled_alone(replica: Replica, stream: Stream) -> None:
    ending = asyncio.create_task(stream.statuses())
    stream.begin(1, 2, 3)
    await until(lambda: len(replica.running) == 3)
    stream.send(cancel=[2, 7])
    await until(lambda: len(replica.running) == 2)
    replica.engine.has_place.set()
    stream.close()
    assert await asyncio.wait_for(ending, 300) == {1: (0, ""), 3: (0, "")}


@on_a_stream
async def test_a_stream_has_a_bound_of_calls(replica: Replica, stream: Stream) -> None:
    ending = asyncio.create_task(stream.statuses())
    stream.begin(*range(1, 10), min_version=1)
    await until(lambda: len(replica.running) == 8)
    replica.engine.has_place.set()
    stream.close()
    statuses = await asyncio.wait_for(ending, 300)
    assert {number for number, (code, _) in statuses.items() if code} == {9}
    assert statuses[9] == (8, "expected at most 8 calls on a stream; found more")


@on_a_stream
async def test_a_further_message_to_a_call_changes_nothing(replica: Replica, stream: Stream) -> None:
    ending = asyncio.create_task(stream.statuses())
    stream.begin(2, 2, 1)
    await until(lambda: len(replica.running) == 1)
    replica.engine.has_place.set()
    stream.close()
    assert await asyncio.wait_for(ending, 300) == {2: (0, "")}


@on_a_stream
async def test_a_stream_ends_with_its_last_call_when_the_replica_drains(replica: Replica, stream: Stream) -> None:
    ending = asyncio.create_task(stream.statuses())
    stream.begin(1)
    await until(lambda: len(replica.running) == 1)
    replica.service.drain()
    stream.begin(2)
    await until(stream.has_sent)
    replica.engine.has_place.set()
    statuses = await asyncio.wait_for(ending, 300)
    assert statuses == {1: (0, ""), 2: (14, "this replica is draining: use another one")}
    assert await asyncio.wait_for(Stream(replica.service).statuses(), 300) == {}
