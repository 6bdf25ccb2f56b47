"""Sequences that wait in the engine while the policy changes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme_rollout.engine.protocol import EngineRequest, NewTokens
from polyreme_rollout.generation.requests import RequestLimits
from polyreme_rollout.generation.sequences import pack_ids
from polyreme_rollout.generation.service import Identity, RolloutService
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from polyreme_rollout.weights.staged_parts import VersionId
from polyreme_rollout.weights.weight_swap import Served, WeightSwapper
from support.waiting import until


class BusyEngine(SimulatedInferenceEngine):
    """An engine that samples nothing until `has_place` is set, and delivers chunks after the first one when `may_go_on` is set.

    `asked` lists its requests.
    """

    def __init__(self) -> None:
        super().__init__(frozenset({"weight"}), max_model_len=64, vocab_size=100)
        self.asked: list[EngineRequest] = []
        self.has_place, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        self.asked.append(request)
        await self.has_place.wait()
        async for new in super().generate(request):
            yield new
            await self.may_go_on.wait()


def serving(engine: BusyEngine) -> tuple[RolloutService, WeightSwapper]:
    service = RolloutService(engine, Identity("run", "replica", "model"), RequestLimits(64, 100, 8), ReplicaMetrics())
    swapper = WeightSwapper("run", engine, lambda: 1, service.on_swap, service.on_lost)
    swapper.served = Served(VersionId(1, 1), ())
    service.bind(swapper)
    return service, swapper


class Refused(Exception):
    """A call's status."""


class Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(code.name, text)


async def answer(service: RolloutService, **versions: int) -> list[pb.GenerateResponse]:
    slot = pb.Slot(index=0, max_new=20, seed=1)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=[2])
    request = pb.GenerateRequest(
        run_id="run", request_id="r", prompt_ids=pack_ids([3, 4]), slots=[slot], sampling=sampling, **versions
    )
    context: Any = Context()
    return [response async for response in service.Generate(request, context)]


async def test_a_sequence_without_a_token_starts_anew_on_the_new_version() -> None:
    engine = BusyEngine()
    service, swapper = serving(engine)
    answering = asyncio.create_task(answer(service))
    await until(lambda: len(engine.asked) == 1)
    swapper.served = Served(VersionId(1, 2), ())
    service.on_swap(2, {engine.asked[0].request_id: 0})
    await until(lambda: len(engine.asked) == 2)
    engine.has_place.set()
    responses = await asyncio.wait_for(answering, 300)
    assert engine.asked[0].request_id != engine.asked[1].request_id
    assert engine.asked[0].salt != engine.asked[1].salt
    [end] = [end for response in responses for end in response.ends]
    assert {span.version for span in end.spans} == {2}
    assert service.running == 0


async def test_a_sequence_with_tokens_continues_and_says_where_the_policy_changed() -> None:
    engine = BusyEngine()
    service, _ = serving(engine)
    answering = asyncio.create_task(answer(service))
    await until(lambda: len(engine.asked) == 1)
    service.on_swap(2, {engine.asked[0].request_id: 1})
    engine.has_place.set()
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start) for span in end.spans][:2] == [(1, 0), (2, 1)]


async def test_a_sequence_that_ended_before_the_policy_changed_keeps_its_version() -> None:
    engine = BusyEngine()
    engine.has_place.set()
    engine.may_go_on.clear()
    service, _ = serving(engine)
    answering = asyncio.create_task(answer(service))
    await until(lambda: any(running.progress.sampled for running in service._running.values()))
    service.on_swap(2, {})
    engine.may_go_on.set()
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start, span.end) for span in end.spans] == [(1, 0, 20)]


async def test_a_sequence_whose_tokens_wait_for_the_end_of_a_swap_keeps_its_version() -> None:
    engine = BusyEngine()
    service, swapper = serving(engine)
    answering = asyncio.create_task(answer(service))
    await until(lambda: len(engine.asked) == 1)
    swapper.steady.clear()
    engine.has_place.set()
    for _ in range(100):  # nothing here waits for anything else than the loop
        await asyncio.sleep(0)
    assert any(running.progress.sampled for running in service._running.values())
    service.on_swap(2, {})
    swapper.steady.set()
    responses = await asyncio.wait_for(answering, 300)
    assert len(engine.asked) == 1
    [end] = [end for response in responses for end in response.ends]
    assert [(span.version, span.start, span.end) for span in end.spans] == [(1, 0, 20)]


async def test_a_cancelled_call_is_not_started_anew() -> None:
    engine = BusyEngine()
    service, _ = serving(engine)
    answering = asyncio.create_task(answer(service))
    await until(lambda: len(engine.asked) == 1)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    await asyncio.wait_for(service.drained(), 60)
    assert answering.cancelled() and len(engine.asked) == 1


@pytest.mark.parametrize(
    ("asked", "served"),
    [({"min_version": 1}, True), ({"min_version": 2}, False), ({"exact_version": 1}, True)]
    + [({"exact_version": other}, False) for other in (0, 2)],
)
async def test_a_call_asks_for_a_version(asked: dict[str, int], served: bool) -> None:
    engine = BusyEngine()
    engine.has_place.set()
    service, _ = serving(engine)
    if served:
        assert await answer(service, **asked)
    else:
        with pytest.raises(Refused, match="found version 1") as refused:
            await answer(service, **asked)
        assert refused.value.args[0] == "FAILED_PRECONDITION"
        assert not engine.asked


async def test_a_call_for_one_version_ends_when_the_policy_changes() -> None:
    engine = BusyEngine()
    service, swapper = serving(engine)
    answering = asyncio.create_task(answer(service, exact_version=1))
    await until(lambda: len(engine.asked) == 1)
    swapper.served = Served(VersionId(1, 2), ())
    service.on_swap(2, {})
    with pytest.raises(Refused, match=r"version 1 .*version 2") as refused:
        await asyncio.wait_for(answering, 300)
    assert refused.value.args[0] == "FAILED_PRECONDITION"
    assert service.running == 0
