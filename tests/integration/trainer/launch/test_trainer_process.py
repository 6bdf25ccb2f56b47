"""The run's state follows from the ends of the trainer's processes: a real run in a real Redis, with small real child processes."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from redis.asyncio import Redis

from polyreme.config.run import RunConfig
from polyreme.errors import GateError, RunFailedError, StaleTermError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.metric_records import DoneLearning, IterationTrained
from polyreme.experience.run import Run, RunState
from polyreme.process.lifecycle import OWNER_DIED
from polyreme.process.supervisor import ChildFailedError, ProcessSet, ProcessSpec
from polyreme.rundir.run_directory import EMBEDDED, read_run_file
from polyreme.rundir.run_records import read_records, read_summary
from polyreme_trainer.launch import supervision, trainer_process
from polyreme_trainer.launch.trainer_process import RendezvousAddress, Trainer, trainer_processes
from polyreme_trainer.megatron.mindspeed import DEVICE
from support.record_lines import read_known
from support.waiting import until

UNTIL_DRAINED = """
import os, redis, time
client = redis.Redis.from_url(os.environ["POLYREME_REDIS"])
while client.hget(os.environ["META"], "state") != b"draining":
    time.sleep(0.02)
"""
FOREVER = "import time\ntime.sleep(600)"


@pytest.fixture
async def config(run: Run) -> RunConfig:
    config = await run.config()
    config.run_dir.mkdir(parents=True)
    return config


def trainer(config: RunConfig, run: Run, redis_url: str, *scripts: str) -> Trainer:
    """A trainer whose children run `scripts`. Each first reports that it has started."""
    env = {"POLYREME_REDIS": redis_url, "META": run.key("meta")}
    says = f"open({str(config.run_dir)!r} + '/started', 'a').write('x')\n"
    units = [
        ProcessSet(
            f"child-{place}",
            lambda place=place, script=script: [ProcessSpec(f"child-{place}", (sys.executable, "-c", says + script), env)],
            config.run_dir,
        )
        for place, script in enumerate(scripts)
    ]
    return Trainer(config, run, units)


async def started(config: RunConfig, count: int = 1) -> None:
    """Waits until `count` children have started. By then the trainer handles signals."""
    path = config.run_dir / "started"
    await until(lambda: path.exists() and len(path.read_text()) == count)


async def test_the_run_is_done_when_every_child_ended_well(run: Run, config: RunConfig, redis_url: str) -> None:
    await run.emit(DoneLearning())
    await trainer(config, run, redis_url, "pass", "pass").run()
    assert await run.state() == (RunState.DONE, "")
    summary = read_summary(config.run_dir)
    assert (summary["run"], summary["state"], summary["reason"]) == (run.run_id, "done", "")
    assert "done_learning" in (config.run_dir / "metrics.jsonl").read_text()


async def test_a_child_that_cannot_go_on_fails_the_run_with_its_reason(run: Run, config: RunConfig, redis_url: str) -> None:
    script = f"import sys; print('learner: error: the replica answers otherwise'); sys.exit({GateError.exit_code})"
    with pytest.raises(ChildFailedError):
        await trainer(config, run, redis_url, script, FOREVER).run()
    state, reason = await run.state()
    assert state is RunState.FAILED
    assert "the replica answers otherwise" in reason
    summary = read_summary(config.run_dir)
    assert (summary["state"], summary["reason"]) == ("failed", reason)


async def test_records_that_cannot_be_written_are_reported_and_written_later(
    run: Run, config: RunConfig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "_RECORDS_RETRY_SECONDS", 0.2)
    in_the_way = config.run_dir / "metrics.jsonl"
    in_the_way.mkdir()
    await run.emit(DoneLearning())
    script = f"import os, time\nwhile os.path.isdir({str(in_the_way)!r}): time.sleep(0.02)"
    task = asyncio.create_task(trainer(config, run, redis_url, script).run())

    async def told() -> str | None:
        notices = [record["text"] for _, record in await run.records("0", 0) if record["kind"] == "notice"]
        return notices[0] if notices else None

    assert "cannot write records" in str(await run.until(told, within=300))
    in_the_way.rmdir()
    await asyncio.wait_for(task, 300)
    assert "done_learning" in in_the_way.read_text()


async def test_a_run_that_another_process_declares_failed_ends_here(run: Run, config: RunConfig, redis_url: str) -> None:
    task = asyncio.create_task(trainer(config, run, redis_url, FOREVER).run())
    await started(config)
    await run.set_state(RunState.FAILED, "no replica is left")
    with pytest.raises(RunFailedError, match="no replica is left"):
        await asyncio.wait_for(task, 300)
    assert await run.state() == (RunState.FAILED, "no replica is left")


async def test_a_stop_drains_and_is_a_good_end(run: Run, config: RunConfig, redis_url: str) -> None:
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED, UNTIL_DRAINED).run())
    await started(config, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 300)
    state, reason = await run.state()
    assert state is RunState.STOPPED
    assert "0 of 1000" in reason
    summary = read_summary(config.run_dir)
    assert (summary["state"], summary["reason"]) == ("stopped", reason)


async def test_a_drain_that_ends_before_the_trainer_reads_it_is_a_stop(
    run: Run, config: RunConfig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "_STATE_POLL_SECONDS", 3600.0)
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED).run())
    await started(config)
    await run.set_state(RunState.DRAINING, "enough")
    await asyncio.wait_for(task, 300)
    assert await run.state() == (RunState.STOPPED, f"enough: 0 of {config.iterations} iterations are trained")


async def test_a_stop_that_comes_after_the_last_iteration_leaves_a_run_that_is_done(
    run: Run, config: RunConfig, redis_url: str
) -> None:
    await run.redis.hset(run.key("meta"), "version", config.iterations)
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED).run())
    await started(config)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 300)
    assert await run.state() == (RunState.DONE, "")


async def test_replicas_are_reported_while_they_are_there(run: Run, config: RunConfig, redis_url: str) -> None:
    (config.run_dir / "run.json").write_text(json.dumps({"run_id": run.run_id, "redis": EMBEDDED}))
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED).run())
    there = {"r0": "http://127.0.0.1:20001/v1"}

    async def reported(wanted: dict[str, str]) -> bool | None:
        records = [record["replicas"] for _, record in await run.records("0", 0) if record["kind"] == "replicas"]
        found = read_run_file(config.run_dir)
        return (bool(records) and records[-1] == wanted and found is not None and found.replicas == wanted) or None

    async with await Registry(run).register(Lease("rollout", "r0", "127.0.0.1:1", "127.0.0.1:20001", 1)):
        assert await run.until(lambda: reported(there), within=300)
    assert await run.until(lambda: reported({}), within=300)
    await run.set_state(RunState.DRAINING)
    await asyncio.wait_for(task, 300)


async def test_a_restart_is_on_record(run: Run, config: RunConfig, redis_url: str) -> None:
    once = f"import os, sys\nif not os.path.exists({str(config.run_dir / 'again')!r}):\n    open({str(config.run_dir / 'again')!r}, 'w')\n    sys.exit(1)"
    await trainer(config, run, redis_url, once).run()
    [restart] = [record for _, record in await run.records("0", 0) if record["kind"] == "restart"]
    assert restart["process"] == "child-0"
    assert "status 1" in restart["text"]


async def test_redis_keeps_no_more_records_than_late_readers_need_and_knows_whose_samples_are_on_disk(
    run: Run, config: RunConfig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "RECORDS_KEPT", 20)
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED).run())
    for number in range(1, 101):
        times = {"time": 2.0 * number, "time/iteration": 2.0}
        await run.emit(IterationTrained(iteration=number, metrics={"reward/mean": 0.5, **times}))
        if number % 10 == 0:

            async def written(number: int = number) -> bool | None:
                return await run.recorded() >= number or None

            assert await run.until(written, within=300)
            assert await run.redis.xlen(run.key("metrics")) <= 60
    await run.set_state(RunState.DRAINING)
    await asyncio.wait_for(task, 300)
    records = [record["iteration"] for record in read_records(config.run_dir, run.run_id) if record["kind"] == "iteration"]
    assert records == list(range(1, 101))
    assert [record["iteration"] for _, record in await run.records("0", 0)][-1] == 100


async def test_a_result_on_other_held_out_data_is_not_compared_and_that_is_reported(
    run: Run, config: RunConfig, redis_url: str
) -> None:
    task = asyncio.create_task(trainer(config, run, redis_url, UNTIL_DRAINED).run())
    metrics = config.run_dir / "metrics.jsonl"
    for version, digest in ((0, "a1"), (1, "a1"), (2, "b2")):
        result = {
            "version": version,
            "accuracy": 0.5,
            "held_out": digest,
            "samples": 1,
            "seconds": 1.0,
            "parts": {},
            "examples": [],
        }
        await run.emit(read_known({"kind": "eval", **result}))
        await until(lambda version=version: metrics.exists() and f'"version": {version}' in metrics.read_text())

    async def reported() -> list[str]:
        return [record["text"] for _, record in await run.records("0", 0) if record["kind"] == "notice"]

    await run.until(reported, within=300)
    await run.set_state(RunState.DRAINING)
    await asyncio.wait_for(task, 300)
    [notice] = await reported()
    assert "held-out data" in notice
    assert read_summary(config.run_dir)["evaluations"] == {"2": 0.5}


async def test_a_drain_takes_its_time_however_soon_attempts_expire(run: Run, config: RunConfig, redis_url: str) -> None:
    impatient = config.model_copy(update={"trainer": config.trainer.model_copy(update={"straggler_timeout": 0.1})})
    task = asyncio.create_task(trainer(impatient, run, redis_url, UNTIL_DRAINED + "time.sleep(1)").run())
    await started(config)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 300)
    assert (await run.state())[0] is RunState.STOPPED


async def test_a_stop_is_over_before_who_asked_for_it_kills(
    run: Run, config: RunConfig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "DRAIN_SECONDS", 0.3)
    task = asyncio.create_task(trainer(config, run, redis_url, FOREVER).run())
    await started(config)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ChildFailedError, match="SIGTERM"):
        await asyncio.wait_for(task, 300)
    assert (await run.state())[0] is RunState.FAILED


ALONE = """
import asyncio, os, sys
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.process.supervisor import ProcessSpec, ProcessSet
from polyreme_trainer.launch.trainer_process import Trainer

async def main(url, run_id, script):
    run = await Run.attach(await connect(url), run_id, 0)
    config = await run.config()
    env = {"POLYREME_REDIS": url, "META": run.key("meta")}
    unit = ProcessSet("child", lambda: [ProcessSpec("child", (sys.executable, "-c", script), env)], config.run_dir)
    await Trainer(config, run, [unit]).run()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ([signal.SIGTERM], RunState.STOPPED),
        ([OWNER_DIED], RunState.STARTING),
        ([OWNER_DIED, OWNER_DIED], RunState.STARTING),
        ([signal.SIGTERM, OWNER_DIED], RunState.DRAINING),
    ],
    ids=["asked to stop", "owner died", "its threads died one by one", "owner died during the drain"],
)
async def test_only_the_death_of_its_owner_ends_a_trainer_without_a_drain(
    numbers: list[int], last: RunState, run: Run, config: RunConfig, redis_url: str
) -> None:
    started = config.run_dir / "started"
    ends = UNTIL_DRAINED if last is RunState.STOPPED else FOREVER
    script = f"open({str(started)!r}, 'w').close()\n{ends}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ALONE, redis_url, run.run_id, script)
    try:
        await until(started.exists)
        for number in numbers:
            process.send_signal(number)
            if last is RunState.DRAINING and number == signal.SIGTERM:
                await until(lambda: is_draining(run))
        status = await asyncio.wait_for(process.wait(), 300)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert (await run.state())[0] is last
    assert status == (0 if last is RunState.STOPPED else 1)  # the kernel did not have to end it


async def is_draining(run: Run) -> bool:
    return (await run.state())[0] is RunState.DRAINING


def test_a_drain_ends_a_good_while_before_the_deployments_lose_patience() -> None:
    root = Path(__file__).resolve().parents[4]
    services = yaml.safe_load((root / "docker-compose.yml").read_text())["services"]
    told = {service["stop_grace_period"] for name, service in services.items() if name.startswith("trainer")}
    chart = (root / "deploy" / "helm" / "polyreme" / "templates" / "trainer.yaml").read_text()
    assert told == {"10m"} and "terminationGracePeriodSeconds: 600 #" in chart
    assert supervision.DRAIN_SECONDS <= 600 - 60


async def test_a_run_taken_over_keeps_the_state_of_its_new_trainer(run: Run, config: RunConfig, redis_url: str) -> None:
    await run.set_state(RunState.RUNNING)
    with pytest.raises(StaleTermError):
        await trainer(config, run, redis_url, f"raise SystemExit({StaleTermError.exit_code})").run()
    assert (await run.state())[0] is RunState.RUNNING


async def test_the_stop_of_a_trainer_that_was_taken_over_is_not_its_successor_s(
    run: Run, config: RunConfig, redis: Redis, redis_url: str
) -> None:
    task = asyncio.create_task(trainer(config, run, redis_url, FOREVER).run())
    await started(config)
    successor = await Run.resume(redis, run.run_id, config, {})
    await successor.set_state(RunState.RUNNING)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StaleTermError):
        await asyncio.wait_for(task, 300)
    assert await successor.state() == (RunState.RUNNING, "")


def test_learner_ranks_start_under_the_launcher_contract(tmp_path: Path, config: RunConfig) -> None:
    parallel = config.trainer.parallel.model_copy(update={"tensor": 2, "data": 2, "threads": 3})
    wide = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": parallel})})
    learner, orchestrator = trainer_processes(wide, "r", "redis://somewhere", tmp_path)
    ranks = learner.programs()
    assert [program.env["RANK"] for program in ranks] == ["0", "1", "2", "3"]
    assert {program.env["WORLD_SIZE"] for program in ranks} == {"4"}
    assert len({program.env["MASTER_PORT"] for program in ranks}) == 1
    assert {program.env["OMP_NUM_THREADS"] for program in ranks} == {"3"}
    for program in ranks:  # whatever is set around the run, they meet on loopback
        reached = [program.env[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
        assert reached == ["127.0.0.1", "lo", "lo"] and program.env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert {program.env[DEVICE] for program in ranks} == {"cpu"}
    assert len(orchestrator.programs()) == 1


def test_ranks_of_several_machines_are_led_by_one_process(tmp_path: Path, config: RunConfig) -> None:
    parallel = config.trainer.parallel.model_copy(update={"data": 2, "nodes": 2})
    wide = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": parallel})})
    learner, _ = trainer_processes(
        wide, "r", "redis://somewhere", tmp_path, rendezvous=RendezvousAddress("trainer.learner", 29500)
    )
    [leader] = learner.programs()
    command = " ".join(leader.argv)
    assert "-m polyreme_trainer.launch" in command and "--port 29500 --host trainer.learner" in command
    assert command.endswith("-- -m polyreme_trainer.learner")
    assert (leader.env["POLYREME_RUN"], leader.env["POLYREME_REDIS"]) == ("r", "redis://somewhere")
