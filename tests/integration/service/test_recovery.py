"""What a restarted learner does, and what is deleted: the real log, learner and directories around a simulated engine."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import RequestLog, in_lane
from polyreme.process.supervisor import STARTS_WITHOUT_MEMORY
from polyreme.process.tasks import running
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Facts, Folders
from polyreme_trainer.service.learner import ModelLearner
from polyreme_trainer.service.messages import SavedModel
from polyreme_trainer.service.states import States
from polyreme_trainer.service.wire import Request, json_result
from polyreme_trainer.testing.simulated_tenants import SimulatedTenantEngine
from support.simulated_service import BASE, LONGEST, VOCAB, engine

MODEL = f"{'a' * 32}:train:0"
LORA = {"rank": 4, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True, "type": "", "user_metadata": {}}
ADAM = {"type": "", "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
KEPT: dict[str, Any] = {"tenant": "t", "ttl": None, "metadata": {}, "overwrite": False}


def batch(token: int) -> Request:
    tokens = np.array([token, 5], "<i4").tobytes()
    targets = pb.TensorData(dense=np.array([5, 6], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    text = pb.InputChunk(encoded_text=pb.EncodedText(tokens=tokens))
    datum = pb.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets})
    body = pb.ForwardBackwardRequest(data=[datum], loss_fn="cross_entropy").SerializeToString()
    return Request("forward_backward", {}, body)


CREATE, STEP = Request("create_model", {"lora": LORA}), Request("optim_step", {"adam": ADAM})
LOOP = [CREATE, *(each for token in range(4) for each in (batch(token), batch(token + 10), STEP))]


def save(name: str, op: str = "save_weights", **fields: Any) -> Request:
    return Request(op, {**KEPT, "name": name, **fields})


class Service:
    """A log with one model, whose learner is started and ended."""

    def __init__(self, log: RequestLog, root: Path, limit: int = 1 << 30, max_models: int = 32) -> None:
        self.log, self.root, self.limit, self.max_models, self.seq = log, root, limit, max_models, -1
        self.unnamed = 32
        self.engine = engine()

    @asynccontextmanager
    async def learner(self, **replay: Any) -> AsyncIterator[None]:
        """A new learner, which ends with the block as by a kill between two of its commands. `replay`: its bounds."""
        self.engine, states = engine(), States(self.root, self.limit, self.unnamed)
        learner = ModelLearner(self.log, self.engine, states, BASE, self.max_models, **replay)
        task = asyncio.create_task(learner.run(asyncio.Event()))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def ask(self, *asked: Request) -> list[bytes]:
        """Submits requests for the model. Returns their results."""
        places = []
        for request in asked:
            self.seq += 1
            places.append(in_lane(MODEL, self.seq))
            assert await self.log.submit(places[-1], request.pack()) == "new"
        results = [await self.log.result(place.id, 60.0) for place in places]
        assert None not in results
        return [result for result in results if result is not None]


@pytest.fixture
async def service(redis: Redis, run_id: str, tmp_path: Path) -> AsyncIterator[Service]:
    log = RequestLog(redis, run_id)
    await log.set_record("model", MODEL, {"tenant": "t"})
    async with log.following():
        yield Service(log, tmp_path / "models")


async def undisturbed(redis: Redis, run_id: str, root: Path) -> list[bytes]:
    log = RequestLog(redis, f"{run_id}-quiet")
    await log.set_record("model", MODEL, {"tenant": "t"})
    quiet = Service(log, root)
    async with log.following(), quiet.learner():
        return await quiet.ask(*LOOP)


async def test_a_learner_killed_after_each_request_has_the_same_bits(
    service: Service, redis: Redis, run_id: str, tmp_path: Path
) -> None:
    wanted, found = await undisturbed(redis, run_id, tmp_path / "quiet"), []
    for request in LOOP:
        async with service.learner():
            found += await service.ask(request)
    assert found == wanted


@pytest.mark.parametrize("replay_seconds", [20.0, 0.0], ids=["from its requests", "from its state"])
async def test_a_step_that_spoils_the_weights_leaves_the_model_as_it_was(
    replay_seconds: float, service: Service, redis: Redis, run_id: str, tmp_path: Path
) -> None:
    """With its gradient, also after a restart."""
    wanted, found = await undisturbed(redis, run_id, tmp_path / "quiet"), []
    spoils = Request("optim_step", {"adam": {**ADAM, "learning_rate": 1e38}})
    for request in LOOP:
        async with service.learner(replay_seconds=replay_seconds):
            found += await service.ask(request)
            assert b"finite weights" in (await service.ask(spoils))[0]
    assert found == wanted


@pytest.mark.parametrize("replay_seconds", [20.0, 0.0], ids=["from its requests", "from its state"])
async def test_a_batch_before_a_spoilt_step_counts_once(replay_seconds: float, service: Service) -> None:
    spoils = Request("optim_step", {"adam": {**ADAM, "learning_rate": 1e38}})
    async with service.learner(replay_seconds=replay_seconds):
        await service.ask(CREATE, batch(1), spoils, batch(2), STEP)
    [step] = await service.log.records.read("0", 10, 1)
    assert step.fields["sequences"] == 2


async def test_a_checkpoint_that_is_deleted_as_it_is_read_changes_nothing(
    service: Service, redis: Redis, run_id: str, tmp_path: Path
) -> None:
    wanted, found = await undisturbed(redis, run_id, tmp_path / "quiet"), []
    load = Request("load_weights", {"path": f"tinker://{MODEL}/weights/half", "optimizer": True, "tenant": "t"})
    async with service.learner():
        found += await service.ask(*LOOP[:5])
        await service.ask(save("half"))
        (service.root / MODEL / "weights" / "half" / "state.safetensors").unlink()
        assert b"deleted while it was read" in (await service.ask(load))[0]
        found += await service.ask(*LOOP[5:])
    assert found == wanted


def test_a_sweep_leaves_the_files_of_others(tmp_path: Path) -> None:
    """Those of the observer, such as a folder that it has just made for samples."""
    (tmp_path / MODEL / "samples").mkdir(parents=True)
    (tmp_path / "old" / "weights").mkdir(parents=True)
    States(tmp_path, 1 << 30).sweep()
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")] == [MODEL, f"{MODEL}/samples"]


async def test_a_restart_begins_at_the_newest_state(service: Service, redis: Redis, run_id: str, tmp_path: Path) -> None:
    """And what it no longer needs is not kept: neither requests, nor earlier states."""
    wanted = await undisturbed(redis, run_id, tmp_path / "quiet")
    async with service.learner(replay_seconds=0.0):
        found = await service.ask(*LOOP[:-1])
    assert await service.log.kept(MODEL) == []
    assert [folder.name for folder in (service.root / MODEL / "states").iterdir()] == [str(len(LOOP) - 2)]
    async with service.learner(replay_seconds=0.0):
        found += await service.ask(LOOP[-1])
        assert service.engine.executed == ["load", "optim_step"], "with the gradient of the state"
    assert found == wanted
    assert await service.log.kept(MODEL) == [] and await service.log.lanes() == set()


@pytest.mark.parametrize("seconds", [0.0, 20.0], ids=["state", "requests"])
async def test_a_critic_is_one_after_a_restart(service: Service, seconds: float) -> None:
    text = pb.InputChunk(encoded_text=pb.EncodedText(tokens=np.array([3, 5], "<i4").tobytes()))
    values = pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[text])], loss_fn="value", forward_only=True)
    asked = Request("forward", {}, values.SerializeToString())
    async with service.learner(replay_seconds=seconds):
        *_, before = await service.ask(Request("create_model", {"lora": LORA, "critic": True}), STEP, asked)
    async with service.learner(replay_seconds=seconds):
        [after] = await service.ask(asked)
        assert ("load" in service.engine.executed) == (seconds == 0)
    assert before == after and pb.ForwardBackwardOutput.FromString(after[1:]).loss_fn_outputs[0].fields.keys() == {"values"}


@pytest.mark.parametrize("kills", [False, True])
async def test_models_beyond_the_memory_are_on_disk(
    kills: bool, service: Service, redis: Redis, run_id: str, tmp_path: Path
) -> None:
    """Five models with memory for two: each has the bits that it has alone, also when it leaves between a gradient and its step."""
    wanted = await undisturbed(redis, run_id, tmp_path / "quiet")
    service.max_models, models = 2, [MODEL.replace(":0", f":{number}") for number in range(5)]
    for model in models:
        await service.log.set_record("model", model, {"tenant": "t"})
    found: dict[str, list[bytes | None]] = {model: [] for model in models}
    most, running = 0, service.learner()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running)
        for seq, request in enumerate(LOOP):
            for model in models:
                await service.log.submit(in_lane(model, seq), request.pack())
            for model in models:
                found[model].append(await service.log.result(f"{model}:{seq}", 60.0))
                most = max(most, len(service.engine.models))
            if kills:
                await stack.aclose()
                await stack.enter_async_context(service.learner())
    assert most == 2 and {len(each) for each in found.values()} == {len(LOOP)}
    assert all(each[1:] == wanted[1:] for each in found.values()), "the first result has the model's name"


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("ranks", [(0, 4), (4, 0)])
async def test_a_young_model_is_seen_by_one_that_cannot_be_beside_it(
    ranks: tuple[int, int], restarts: bool, service: Service
) -> None:
    """One without a saved state, which is not in memory since a restart, or since a step that has spoilt it."""
    create, other = (Request("create_model", {"lora": {**LORA, "rank": rank}}) for rank in ranks)
    place = in_lane(MODEL.replace(":0", ":1"), 0)
    for model, rank in zip((MODEL, place.lane), ranks, strict=True):
        await service.log.set_record("model", model, {"tenant": "t", "rank": str(rank)})
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service.learner())
        await service.ask(create, batch(1), STEP)
        if restarts:
            await stack.aclose()
            await stack.enter_async_context(service.learner())
        else:
            await service.ask(Request("optim_step", {"adam": {**ADAM, "learning_rate": 1e38}}))
        await service.log.submit(place, other.pack())
        refused = await service.log.result(place.id, 60.0)
        assert refused is not None and b"shares the base model with no other" in refused
        assert not any(b"error" in result for result in await service.ask(batch(1), STEP))


async def test_a_full_disk_refuses_new_models_alone(service: Service) -> None:
    async with service.learner():
        await service.ask(*LOOP, save("named"))
        service.limit = 1
    async with service.learner():
        other = in_lane(MODEL.replace(":0", ":1"), 0)
        await service.log.set_record("model", other.lane, {"tenant": "t"})
        await service.log.submit(other, CREATE.pack())
        refused = await service.log.result(other.id, 60.0)
        assert refused is not None and b"GiB of models on disk" in refused
        [step] = await service.ask(STEP)
        assert b"error" not in step


async def test_records_of_the_page_leave_room_for_models(service: Service) -> None:
    service.limit = 1 << 20
    (folder := service.root / f"{MODEL}1" / "samples").mkdir(parents=True)
    (folder / "served_1-0.jsonl").write_bytes(b" " * (2 << 20))
    async with service.learner():
        [created] = await service.ask(CREATE)
    assert b"error" not in created


async def test_requests_of_many_bytes_are_in_a_state_soon(service: Service) -> None:
    """Also without an optimizer step."""
    async with service.learner(replay_bytes=3 * len(batch(1).pack())):
        await service.ask(CREATE, *(batch(1) for _ in range(10)))
    assert len(await service.log.kept(MODEL)) <= 4


async def test_a_loaded_checkpoint_may_be_deleted(service: Service) -> None:
    async with service.learner():
        await service.ask(*LOOP, save("end"))
        path = f"tinker://{MODEL}/weights/end"
        await service.ask(batch(1), STEP, Request("load_weights", {"path": path, "optimizer": True, "tenant": "t"}))
        [before] = await service.ask(batch(2))
    [saved] = Folders(service.root).kept(MODEL, "t")
    Folders(service.root).delete(saved.name, "t")
    async with service.learner():
        again = await service.ask(STEP, batch(2))
        assert b"error" not in again[0]
    assert before != again[1]
    assert Folders(service.root).kept(MODEL) == []


async def test_a_model_from_a_checkpoint_has_its_moments_if_asked(service: Service) -> None:
    """And it outlives the learner and the checkpoint."""
    path, results = f"tinker://{MODEL}/weights/end", []
    async with service.learner():
        await service.ask(*LOOP, save("end"))
        [same] = (await service.ask(batch(1), STEP, batch(2)))[2:]
    for number, optimizer in ((1, True), (2, False)):
        model, loaded = MODEL.replace(":0", f":{number}"), {"path": path, "optimizer": optimizer, "tenant": "t"}
        await service.log.set_record("model", model, {"tenant": "t"})
        steps = [Request("create_from", loaded), batch(1), STEP, batch(2)]
        for seq, request in enumerate(steps):
            await service.log.submit(in_lane(model, seq), request.pack())
            async with service.learner():
                results.append(await service.log.result(f"{model}:{seq}", 60.0))
    assert b"error" not in results[0] + results[4]
    assert results[1] == results[5], "the weights are those of the checkpoint"
    assert results[3] == same != results[7]


async def test_an_expired_model_leaves_nothing(service: Service, redis: Redis) -> None:
    async with service.learner(replay_seconds=0.0):
        await service.ask(*LOOP, batch(1))
    service.log.limits.record_seconds = 0
    await service.log.use_record("t", "model", MODEL)
    async with service.learner():
        await gone(service.root / MODEL)
    assert await service.log.lanes() == set() and await service.log.kept(MODEL) == []


async def gone(path: Path) -> None:
    async with asyncio.timeout(30):
        while await asyncio.to_thread(path.exists):  # noqa: ASYNC110 (the end of a directory is no event)
            await asyncio.sleep(0.01)


class LastAnswer(RequestLog):
    """The log of a learner that is killed around its first answer."""

    def __init__(self, redis: Redis, name: str, answered: bool) -> None:
        super().__init__(redis, name)
        self._answered, self.killed = answered, asyncio.Event()

    async def finish(self, *given: Any, **options: Any) -> bool:
        if self._answered:
            await super().finish(*given, **options)
        self.killed.set()
        return await asyncio.Future()


@pytest.mark.parametrize("answered", [False, True])
async def test_a_kill_around_an_unload_leaves_no_model(answered: bool, service: Service, redis: Redis, run_id: str) -> None:
    async with service.learner(replay_seconds=0.0):
        await service.ask(CREATE, batch(1))
    log, unload = service.log, in_lane(MODEL, 2)
    await log.submit(unload, Request("unload_model", {}).pack())
    service.log = last = LastAnswer(redis, run_id, answered)
    async with asyncio.timeout(60), service.learner():
        await last.killed.wait()
    service.log = log
    async with service.learner():
        assert await log.result(unload.id, 60.0) == json_result(type="unload_model", model_id=MODEL)
    assert States(service.root, 1).unfinished() == [] and await log.kept(MODEL) == []
    assert [line.fields["kind"] for line in await log.records.read("0", 10, 1)] == ["done"]


async def test_checkpoints_expire(service: Service) -> None:
    async with service.learner():
        results = await service.ask(*LOOP, save("short", ttl=0.001), save("long", ttl=3600))
        assert not any(b"error" in result for result in results)
    await asyncio.to_thread(time.sleep, 0.01)
    async with service.learner():
        await gone(service.root / MODEL / "weights" / "short")
    [left] = Folders(service.root).kept(MODEL)
    assert left.name.name == "long"
    Folders(service.root).set_expiry(left.name, "t", None)
    assert Folders(service.root).kept(MODEL)[0].facts.expires is None


async def test_checkpoints_have_a_share_of_the_disk(service: Service) -> None:
    """Those without a name make room, the oldest first; then a save is refused, and the model goes on."""
    service.unnamed = 2
    unnamed = [save(f"request-{n}", "save_weights_for_sampler", sampling_session=f"s:{n}") for n in range(4)]
    async with service.learner():
        await service.ask(*LOOP, save("named"), *unnamed)
        kept = Folders(service.root).kept(MODEL)
        assert [each.name.name for each in kept] == ["named", "request-2", "request-3"]
    service.limit = sum(each.nbytes for each in kept)
    async with service.learner():
        [fits, full, step] = await service.ask(save("second"), save("third"), STEP)
    assert (b"error" in fits, b"error" in full, b"error" in step) == (False, True, False)
    assert b"GiB of checkpoints" in full
    assert [each.name.name for each in Folders(service.root).kept(MODEL)] == ["named", "second"]


def test_a_save_that_is_refused_deletes_nothing(tmp_path: Path) -> None:
    """And one that replaces a checkpoint has its room."""
    states = States(tmp_path, 10_000)

    def write(name: str, nbytes: int, seq: int, overwrite: bool = False) -> None:
        facts = Facts(BASE, None, seq, 0, created=seq, is_named=name != "unnamed")
        data, saved = b" " * nbytes, SavedModel(MODEL, "weights", name)
        states.save(saved, lambda folder: (folder / "file").write_bytes(data), facts, overwrite)

    write("unnamed", 500, 1)
    write("large", 6000, 2)
    with pytest.raises(TenantError, match="GiB of checkpoints"):
        write("larger", 7000, 3)
    write("large", 6000, 4, overwrite=True)
    assert [each.name.name for each in states.kept(MODEL)] == ["unnamed", "large"]


async def test_results_have_a_bound_for_each_session(service: Service) -> None:
    """A client that reads nothing: the oldest results go first, and another session's stay."""
    service.log.limits.result_bytes = 1000
    other = in_lane(f"{'b' * 32}:train:0", 0)
    await service.log.submit(other, CREATE.pack())
    await service.log.finish(other, json_result(type="other"))
    for seq in range(30):
        await service.log.submit(in_lane(MODEL, seq), CREATE.pack())
        await service.log.finish(in_lane(MODEL, seq), json_result(text="x" * 100))
    found = [await service.log.result(f"{MODEL}:{seq}") for seq in range(30)]
    kept = [result for result in found if result is not None]
    assert found == [None] * (30 - len(kept)) + kept and sum(map(len, kept)) <= 1000 < sum(map(len, kept)) + len(kept[0])
    assert await service.log.result(other.id) is not None
    assert await service.log.is_past(f"{MODEL}:0") and not await service.log.is_past(f"{MODEL}:30")
    assert await service.log.submit(in_lane(MODEL, 0), CREATE.pack()) == "gone"


async def test_a_request_that_ended_two_learners_fails(service: Service) -> None:
    """Before the service ends because its learner lacks memory at every start."""
    for number, begun in enumerate((STARTS_WITHOUT_MEMORY - 2, STARTS_WITHOUT_MEMORY - 1)):
        place = in_lane(MODEL.replace(":0", f":{number}"), 0)
        await service.log.set_record("model", place.lane, {"tenant": "t"})
        await service.log.submit(place, CREATE.pack())
        for _ in range(begun):
            await service.log.begin([place])
        async with service.learner():
            result = await service.log.result(place.id, 60.0)
        assert result is not None and (b'"category": "server"' in result) == (begun == STARTS_WITHOUT_MEMORY - 1)


class Lacking(SimulatedTenantEngine):
    """An engine whose process ends as it takes a saved model into memory."""

    def load(self, *given: Any, **named: Any) -> None:
        raise MemoryError


async def test_a_model_that_ends_each_start_is_given_up(service: Service, redis: Redis, run_id: str, tmp_path: Path) -> None:
    """Before the service would end. Other models go on, and so does this one in a later process."""
    wanted = await undisturbed(redis, run_id, tmp_path / "quiet")
    async with service.learner(replay_seconds=0.0):
        found = await service.ask(*LOOP[:-2])
    asking = asyncio.create_task(service.ask(LOOP[-2]))
    logs = [RequestLog(redis, run_id) for _ in range(STARTS_WITHOUT_MEMORY)]
    learners = [ModelLearner(log, Lacking(VOCAB, LONGEST), States(service.root, 1 << 30), BASE, 32) for log in logs]
    for learner in learners[:-1]:
        with pytest.raises(MemoryError):
            await learner.run(asyncio.Event())
    async with running(learners[-1].run(asyncio.Event())):
        other = in_lane(MODEL.replace(":0", ":1"), 0)
        await service.log.set_record("model", other.lane, {"tenant": "t"})
        await service.log.submit(other, CREATE.pack())
        refused = [*await asking, *await service.ask(STEP)]
        created = await service.log.result(other.id, 60.0)
    assert all(b'"category": "server"' in each and b"ended 2 times" in each for each in refused)
    assert created is not None and b"error" not in created
    service.log = RequestLog(redis, run_id)
    async with service.log.following(), service.learner():
        found += await service.ask(*LOOP[-2:])
    assert found == wanted


async def test_a_request_for_no_model_moves_none_to_disk(service: Service) -> None:
    service.max_models = 1
    other = in_lane(MODEL.replace(":0", ":1"), 0)
    async with service.learner():
        await service.ask(CREATE)
        await service.log.submit(other, STEP.pack())
        refused = await service.log.result(other.id, 60.0)
        assert refused is not None and b"could not be created" in refused
        assert list(service.engine.models) == [MODEL]


class Refusing(SimulatedTenantEngine):
    """An engine that drops the gradient of its first step."""

    def optim_step(self, name: str, given: Any) -> tuple[float, int]:
        if "refused" not in self.executed:
            self.executed.append("refused")
            raise TenantError("expected a finite gradient; found norm nan")
        return super().optim_step(name, given)


async def test_batches_of_a_dropped_gradient_are_in_no_step(service: Service) -> None:
    """Their loss may be NaN, which the page cannot show."""
    learner = ModelLearner(service.log, Refusing(VOCAB, LONGEST), States(service.root, 1 << 30), BASE, 32)
    async with running(learner.run(asyncio.Event())):
        *_, refused, _, _ = await service.ask(CREATE, batch(1), STEP, batch(2), STEP)
    assert b"finite gradient" in refused
    [step] = await service.log.records.read("0", 10, 1)
    assert (step.fields["sequences"], step.fields["tokens"]) == (1, 2)
