"""Which requests of several models are executed together, and snapshots that a sampler loads: the real log and learner around a simulated
engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LogPlace, RequestLog, in_lane
from polyreme_trainer.service.folders import Facts, Folders
from polyreme_trainer.service.learner import ModelLearner
from polyreme_trainer.service.snapshots import SnapshotProbe
from polyreme_trainer.service.states import States
from polyreme_trainer.service.wire import Request, failure
from polyreme_trainer.testing.simulated_tenants import SimulatedTenantEngine
from support.simulated_service import BASE, LONGEST, VOCAB, engine, sample
from support.waiting import until

MODELS = [f"{letter * 32}:train:0" for letter in "abc"]
LORA = {"rank": 4, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True, "type": "", "user_metadata": {}}
CREATE = Request("create_model", {"lora": LORA})
SAVE: dict[str, Any] = {"tenant": "t", "ttl": None, "metadata": {}, "overwrite": False, "name": "one", "sampling_session": ""}


def batch(op: str, token: int) -> Request:
    tokens = np.array([token, 5], "<i4").tobytes()
    targets = pb.TensorData(dense=np.array([5, 6], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    text = pb.InputChunk(encoded_text=pb.EncodedText(tokens=tokens))
    datum = pb.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets})
    return Request(op, {}, pb.ForwardBackwardRequest(data=[datum], loss_fn="cross_entropy").SerializeToString())


@asynccontextmanager
async def learning(
    log: RequestLog, root: Path, canary: SnapshotProbe | None = None, computing: SimulatedTenantEngine | None = None
) -> AsyncIterator[SimulatedTenantEngine]:
    """A learner, with an engine that has models already or with a new one."""
    computing = computing or engine()
    learner = ModelLearner(log, computing, States(root, 1 << 30), BASE, 32, canary)
    task = asyncio.create_task(learner.run(asyncio.Event()))
    try:
        yield computing
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def log(redis: Redis, run_id: str) -> AsyncIterator[RequestLog]:
    log = RequestLog(redis, run_id)
    for model in MODELS:
        await log.set_record("model", model, {"tenant": "t"})
    async with log.following():
        yield log


async def submit(log: RequestLog, seq: int, **requests: Request) -> list[LogPlace]:
    """Submits a request for the models `a`, `b` and `c`."""
    places = [in_lane(f"{name * 32}:train:0", seq) for name in requests]
    for place, request in zip(places, requests.values(), strict=True):
        assert await log.submit(place, request.pack()) == "new"
    return places


@asynccontextmanager
async def sampling(log: RequestLog) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(sample(log, stop))
    yield
    stop.set()
    await task


async def results(log: RequestLog, places: list[LogPlace]) -> list[bytes]:
    found = [await log.result(place.id, 60.0) for place in places]
    return [each for each in found if each is not None]


async def test_batches_that_wait_share_a_pass(log: RequestLog, tmp_path: Path) -> None:
    """Those of the same operation; and each has the result that it has alone."""
    created = await submit(log, 0, a=CREATE, b=CREATE, c=CREATE)
    backward, forward = batch("forward_backward", 3), batch("forward", 3)
    async with learning(log, tmp_path) as computing:
        await results(log, created)
    waiting = await submit(log, 1, a=backward, b=backward, c=forward)
    async with learning(log, tmp_path, computing=computing):
        together = await results(log, waiting)
        assert sorted(map(len, computing.passes)) == [1, 2]
        assert [MODELS[0], MODELS[1]] in computing.passes
        later = await submit(log, 2, a=backward)
        [alone] = await results(log, later)
    assert together[0] == together[1] == alone, "the same adapters, before a step"


async def test_a_request_that_ended_the_process_is_executed_alone(log: RequestLog, tmp_path: Path) -> None:
    created = await submit(log, 0, a=CREATE, b=CREATE, c=CREATE)
    async with learning(log, tmp_path) as computing:
        await results(log, created)
    backward = batch("forward_backward", 3)
    waiting = await submit(log, 1, a=backward, b=backward, c=backward)
    await log.begin([waiting[1]])
    async with learning(log, tmp_path) as computing:
        assert len(await results(log, waiting)) == 3
    assert [MODELS[1]] in computing.passes
    assert all(MODELS[1] not in each for each in computing.passes if len(each) > 1)


async def test_a_snapshot_is_loaded_before_its_answer(log: RequestLog, tmp_path: Path) -> None:
    """Other models go on meanwhile."""
    stop, save = asyncio.Event(), Request("save_weights_for_sampler", SAVE)
    canary = SnapshotProbe.of(VOCAB, LONGEST, "float32")
    async with learning(log, tmp_path, SnapshotProbe(canary.ids, np.inf)):
        await results(log, await submit(log, 0, a=CREATE, b=CREATE))
        [saved], [other] = await submit(log, 1, a=save), await submit(log, 1, b=batch("forward", 3))
        await results(log, [other])
        assert await log.result(saved.id) is None, "no sampler has loaded it"
        sampling = asyncio.create_task(sample(log, stop))
        [answer] = await results(log, [saved])
        assert b"tinker://" in answer and await log.result(f"{saved.id}:load") is not None
        stop.set()
        await sampling


async def test_a_snapshot_that_samples_otherwise_is_refused(log: RequestLog, tmp_path: Path) -> None:
    """And is gone, so that the same name can be saved again."""
    stop, save = asyncio.Event(), Request("save_weights_for_sampler", SAVE)
    sampling = asyncio.create_task(sample(log, stop))
    async with learning(log, tmp_path, SnapshotProbe.of(VOCAB, LONGEST, "float32")):
        await results(log, await submit(log, 0, a=CREATE))
        answers = await results(log, [*await submit(log, 1, a=save), *await submit(log, 2, a=save)])
    assert all(b"mismatch_kl" in answer and b'"server"' in answer for answer in answers) and len(answers) == 2
    assert Folders(tmp_path).kept(MODELS[0]) == []
    stop.set()
    await sampling


async def test_a_failure_of_the_sampler_is_told_as_it_is(log: RequestLog, tmp_path: Path) -> None:
    async with asyncio.timeout(60), learning(log, tmp_path, SnapshotProbe.of(VOCAB, LONGEST, "float32")):
        await results(log, await submit(log, 0, a=CREATE))
        [saved] = await submit(log, 1, a=Request("save_weights_for_sampler", SAVE))
        ask, event = LogPlace(f"{saved.id}:load", "sampler"), "0"
        while not await log.finish(ask, failure("no space left", "server")):
            event, _ = await log.wait("sampler", event)
        assert await results(log, [saved]) == [failure("no space left", "server")]


async def test_a_snapshot_without_a_sampler_is_noted(log: RequestLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = SnapshotProbe.of(VOCAB, LONGEST, "float32")
    async with learning(log, tmp_path, replace(canary, seconds=0.0)):
        await results(log, await submit(log, 0, a=CREATE))
        [saved] = await submit(log, 1, a=Request("save_weights_for_sampler", SAVE))
        [answer] = await results(log, [saved])
    assert b"tinker://" in answer
    assert any(saved.id in record.message for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize("kills", [False, True])
async def test_a_refused_snapshot_leaves_what_it_replaces(kills: bool, log: RequestLog, tmp_path: Path) -> None:
    """Also when the learner is killed before the sampler has loaded it."""
    strict, saved = SnapshotProbe.of(VOCAB, LONGEST, "float32"), tmp_path / MODELS[0] / "sampler_weights" / "one"
    again = Request("save_weights_for_sampler", {**SAVE, "overwrite": True})
    first = [CREATE, Request("save_weights_for_sampler", SAVE), batch("forward_backward", 3), Request("optim_step", {"adam": {}})]
    async with learning(log, tmp_path, replace(strict, limit=np.inf)), sampling(log):
        for seq, request in enumerate(first):
            assert b"error" not in (await results(log, await submit(log, seq, a=request)))[0]
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    [place] = await submit(log, 4, a=again)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(learning(log, tmp_path, strict))
        if kills:
            await until(lambda: (facts := Facts.read(saved)) is not None and facts.seq == 4)
            await stack.aclose()
            await stack.enter_async_context(learning(log, tmp_path, strict))
        await stack.enter_async_context(sampling(log))
        [refused] = await results(log, [place])
    assert b"mismatch_kl" in refused
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [each.name for each in saved.parent.iterdir()] == ["one"]


async def test_a_mismatch_that_is_found_late_is_acted_on(log: RequestLog, tmp_path: Path) -> None:
    """The client has heard of the weights, and its model goes on."""
    canary = replace(SnapshotProbe.of(VOCAB, LONGEST, "float32"), seconds=0.0)
    async with learning(log, tmp_path, canary):
        await results(log, await submit(log, 0, a=CREATE))
        [answer] = await results(log, await submit(log, 1, a=Request("save_weights_for_sampler", SAVE)))
        assert b"tinker://" in answer and len(Folders(tmp_path).kept(MODELS[0])) == 1
        await results(log, await submit(log, 2, a=batch("forward", 3)))
        async with sampling(log):
            await until(lambda: not Folders(tmp_path).kept(MODELS[0]))
