"""Each model of a training service is a run directory, from records in a real Redis."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from redis.asyncio import Redis

from polyreme.cli.commands.samples import sample_text
from polyreme.cli.commands.status import service_lines
from polyreme.experience.metric_records import StageDone, StageStep
from polyreme.experience.requests import RequestLog, in_lane
from polyreme.experience.service_records import SampledAnswer, SampledGroup, as_line
from polyreme.hub.tiny_model import write_tiny_model
from polyreme.rundir.reader import RunReader, SampleQuery
from polyreme.rundir.run_records import read_summary
from polyreme.rundir.service_status import ServiceState, model_statuses
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import RowsLoss
from polyreme_trainer.remote import RemoteService
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.observer.metrics import ServiceMetrics
from polyreme_trainer.service.observer.observer import Observer
from polyreme_trainer.service.wire import Request
from polyreme_trainer.stages.table import cross_entropy
from support.configs import run_config
from support.simulated_service import simulated_service
from support.waiting import until

TENANT = "ab" * 8
MODEL = f"{TENANT}{'0' * 16}:train:0"


def step(loss: float) -> StageStep:
    metrics = {"loss": loss, "grad_norm": 2.0, "tokens": 30.0, "trained_tokens": 20, "time/step": 0.5, "time/queue": 0.25}
    return StageStep(step=0, metrics=metrics)


def group(*texts: str) -> SampledGroup:
    answers = [SampledAnswer(text, [5, 6], [-0.5, -1.5], "stop") for text in texts]
    return SampledGroup("sampler_weights/one", "What?", 3, 1000.0, 0.5, answers)


class World:
    """A log, and an observer of it that can be started again."""

    def __init__(self, redis: Redis, name: str, folder: Path) -> None:
        self.log, self.folder, self.samples_bytes = RequestLog(redis, name), folder, 1 << 30
        write_tiny_model(folder / "base")
        self.observer = self.new_observer()

    def new_observer(self) -> Observer:
        made = Observer(self.log, self.folder, self.folder / "base", "tiny", {TENANT: "alice"})
        made.samples_bytes = self.samples_bytes
        return made

    async def observe(self, lines: int) -> None:
        """Runs an observer until the model has this many lines."""
        self.observer, stop = self.new_observer(), asyncio.Event()
        running = asyncio.create_task(self.observer.run(stop))
        await until(lambda: running.done() or (len(self.lines()) >= lines and bool(self.observer.state.updated)))
        stop.set()
        await running

    def lines(self) -> list[dict[str, object]]:
        path = self.folder / "models" / MODEL / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def world(redis: Redis, run_id: str, tmp_path: Path) -> World:
    return World(redis, run_id, tmp_path)


async def test_a_model_is_a_run_with_steps_and_samples(world: World) -> None:
    await world.log.set_record("model", MODEL, {"rank": "4", "metadata": "{}"})
    await world.log.records.add(MODEL, as_line(step(3.0)))
    await world.log.records.add_sampled(MODEL, group("one", "two"))
    await world.log.records.add_sampled(MODEL, group("three"))
    await world.log.records.add(MODEL, as_line(step(2.0)))
    await world.observe(3)
    reader = RunReader(world.folder / "models" / MODEL)
    reader.refresh()
    assert reader.series("train/loss")[1].tolist() == [3.0, 2.0]
    assert reader.series("train/time/queue")[0].tolist() == [1, 2]
    total, samples = reader.find_samples(SampleQuery(order="oldest"))
    assert total == 3
    assert [(each["id"], each["step"], each["response"], each["score"]) for each in samples] == [
        ("0.0", 1, "one", None),
        ("0.1", 1, "two", None),
        ("1.0", 1, "three", None),
    ]
    assert reader.config()["tenant"] == "alice" and reader.config()["rank"] == 4
    assert reader.summary()["state"] == "stopped"


async def test_an_observer_that_starts_again_repeats_nothing(world: World, redis: Redis) -> None:
    await world.log.records.add(MODEL, as_line(step(3.0)))
    await world.log.records.add_sampled(MODEL, group("one"))
    await world.observe(2)
    await world.log.records.add_sampled(MODEL, group("two"))
    await world.log.records.add(MODEL, as_line(step(1.0)))
    await world.observe(4)
    assert [line.get("step") for line in world.lines()] == [1, None, None, 2]
    assert [line["next_group"] for line in world.lines() if line["kind"] == "samples"] == [1, 2]
    assert await world.log.records.read("0", 10, 1) == []


async def test_the_samples_of_a_model_have_a_bound(world: World) -> None:
    """The page has the newest ones, also with an index that it builds anew."""
    world.samples_bytes, model = 3000, world.folder / "models" / MODEL
    for number in range(9):
        await world.log.records.add_sampled(MODEL, group(f"{number}", f"{number}" * 100))
        await world.observe(number + 1)
        if number == 4:
            (early := RunReader(model)).refresh()
    files = list((model / "samples").iterdir())
    assert 1 < len(files) < 9 and sum(file.stat().st_size for file in files) <= 3000
    for reader in (early, RunReader(model)):
        reader.refresh()
        found = [(sample["group"], sample["sample"]) for sample in reader.read_samples(SampleQuery(order="oldest"))]
        assert found == [(number, place) for number in range(9 - len(files), 9) for place in (0, 1)]
        assert reader.contents().samples == len(found) and len(reader.group_spans(0, 9)) == len(files)
        (model / "index.sqlite").unlink()


async def test_a_folder_tells_the_models_of_each_tenant(world: World) -> None:
    await world.log.records.add(MODEL, as_line(step(3.0)))
    await world.log.records.add_sampled(MODEL, group("one"))
    await world.log.submit(in_lane(MODEL, 0), b"{}\n")
    await world.observe(2)
    state = ServiceState.read(world.folder)
    assert state is not None and state.workers["learner"].queued == {MODEL: 1}
    [found] = model_statuses(world.folder, state)
    assert (found.tenant, found.state, found.steps, found.loss) == ("alice", "stopped", 1, 3.0)
    assert (found.trained_tokens, found.sampled_tokens) == (20, 2)
    head, _, row = service_lines(world.folder, state, [found], found.updated or 0.0)
    assert head.endswith("tiny, stopped") and row.split()[:7] == ["alice", MODEL, "stopped", "1", "3", "20", "2"]


async def test_an_unloaded_model_is_a_run_that_is_done(world: World) -> None:
    await world.log.records.add(MODEL, as_line(step(3.0)))
    await world.log.records.add(MODEL, as_line(StageDone(step=0, hf_path="")))
    await world.observe(2)
    assert RunReader(world.folder / "models" / MODEL).summary()["state"] == "done"


async def test_prometheus_has_the_queue_and_each_tenants_tokens(world: World) -> None:
    await world.log.records.add(MODEL, as_line(step(3.0)))
    await world.log.records.count({TENANT: {"trained_tokens": 20, "steps": 1}, "learner": {"busy_seconds": 1.5}})
    await world.log.records.count({TENANT: {"sampled_tokens": 7}})
    await world.log.submit(in_lane(MODEL, 0), b"{}\n")
    await world.observe(1)
    text = generate_latest(ServiceMetrics(world.observer).registry).decode()
    assert 'polyreme_service_queue{tenant="alice",worker="learner"} 1.0' in text
    assert 'polyreme_service_tokens_total{kind="trained",tenant="alice"} 20.0' in text
    assert 'polyreme_service_tokens_total{kind="sampled",tenant="alice"} 7.0' in text
    assert 'polyreme_service_busy_seconds_total{worker="learner"} 1.5' in text


async def test_requests_of_one_pass_are_busy_once(world: World) -> None:
    request = Request("forward", {})
    _, counts = StepMeters().report({in_lane(MODEL, 0): request, in_lane(f"{MODEL}1", 0): request}, 10.0, 12.0)
    await world.log.records.count(counts)
    assert (await world.log.records.counts())["learner"] == {"busy_seconds": 2.0}


async def test_a_program_on_the_service_is_seen(redis: Redis, run_id: str, tmp_path: Path) -> None:
    """The API, the learner and the sampler are real, around simulated engines."""
    write_tiny_model(tmp_path / "base")

    def program(address: str) -> list[tuple[int, ...]]:
        with RemoteService.open(run_config(tmp_path), address) as service:
            service.begin_iterations()
            for _ in range(2):
                rows = StageRows([np.array([5, 6, 7, 8], np.int32)], [np.array([0, 0, 1, 1], np.uint8)])
                metrics = service.forward_backward("actor", rows, RowsLoss(cross_entropy()))
                assert service.means(metrics)["loss"] > 0
                assert service.optim_step("actor", 0.01)["lr"] == 0.01
            service.load(service.publish(2))
            return [answer.ids for answer in service.sample([[5, 6], [7]], (1,))]

    async with simulated_service(redis, run_id, tmp_path / "models") as address:
        observer, stop = Observer(RequestLog(redis, run_id), tmp_path, tmp_path / "base", "tiny", {}), asyncio.Event()
        observing = asyncio.create_task(observer.run(stop))
        answers = await asyncio.to_thread(program, address)
        [folder] = (tmp_path / "models").iterdir()
        await until(lambda: read_summary(folder).get("state") == "done")
        stop.set()
        await observing
    reader = RunReader(folder)
    reader.refresh()
    assert reader.series("train/trained_tokens")[1].tolist() == [2, 2]
    assert reader.series("train/optimizer_steps")[1].tolist() == [1, 2]
    _, samples = reader.find_samples(SampleQuery(order="oldest"))
    assert sorted(each["response"] for each in samples) == sorted(" ".join(map(str, ids)) for ids in answers)
    assert {each["step"] for each in samples} == {2}
    assert sample_text(reader.sample("0.0") or {})[0].startswith("iteration 2, group 0: reward -, ")
