"""Simulated learner and replicas as processes, in a run whose other parts are real."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from polyreme.config.run import RunConfig
from polyreme.display.notebook import RunHandle
from polyreme.errors import ConfigError
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect
from polyreme.rundir.fork import copy_start
from polyreme.rundir.run_directory import EMBEDDED
from polyreme.rundir.run_records import read_summary
from polyreme_trainer.testing.simulated_engine import LAYOUT, after_plan, newest
from support.processes import command_line
from support.simulated import ROWS
from support.simulated_run import simulated_run
from support.waiting import until


async def test_it_trains_every_planned_group_once_and_in_order(redis_url: str, run_id: str, tmp_path: Path) -> None:
    async with simulated_run(redis_url, run_id, tmp_path, iterations=4, trainer={"save_interval": 2}) as started:
        state, reason = await started.ended(300)
        assert (state, reason) == ("done", ""), started.logs()
        log = ExperienceLog(started.run)
        assert (await log.audit()).clean
        plans = b"\0" * 32
        for iteration in range(1, 5):
            plan = await log.find_plan(iteration)
            assert plan is not None
            plans = after_plan(plans, plan.iteration, plan.indices)
        last = newest(tmp_path / "run" / "checkpoints")
        assert last is not None
        assert (last.version, last.plans) == (4, plans)
        assert [record["iteration"] for record in await started.records("iteration")] == [1, 2, 3, 4]
        assert len(bytes.fromhex((await started.records("iteration"))[-1]["weights"])) == LAYOUT.nbytes


async def test_checkpoints_follow_by_time_and_a_resumed_learner_says_where_it_continues(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    by_time = {"save_minutes": 1e-9, "keep_checkpoints": 2}
    async with simulated_run(redis_url, run_id, tmp_path, iterations=40, trainer=by_time, train_seconds=0.2) as started:

        async def has_saved() -> bool:
            return any(record["iteration"] > 0 for record in await started.records("saved"))

        await until(has_saved, 300)
        [learner] = [
            process
            for process in psutil.Process(started.children["train"].pid).children(recursive=True)
            if "polyreme_trainer.testing.simulated_learner" in command_line(process)
        ]
        learner.kill()
        assert await started.ended(300) == ("done", ""), started.logs()
        saved = [record["iteration"] for record in await started.records("saved")]
        assert saved[0] == 0 and saved[-1] == 40 and len(saved) > 2
        [resumed] = await started.records("resumed")
        assert 0 < resumed["iteration"] < 40


COUNT = """
class Count:
    def __init__(self): self.seen = 0
    def reset(self, row): return None
    def step(self, message):
        self.seen += 1
        return "more", 0.25, self.seen == 3
"""


async def test_it_plays_episodes_and_survives_the_death_of_their_server(redis_url: str, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    played = {"reward": None, "environment": {"file": str(tmp_path / "count.py"), "start_timeout": 300.0}}
    played["rollout"] = {"max_new_tokens": 24}  # three turns fit the context
    async with simulated_run(redis_url, run_id, tmp_path, iterations=6, train_seconds=0.3, **played) as started:
        log = ExperienceLog(started.run)
        while await log.version() < 2:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.05)
        server = started.children["environment"]
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        started.start("environment")
        assert await started.ended(300) == ("done", ""), started.logs()
        assert (await log.audit()).clean
        records = await started.records("iteration")
        assert [(record["reward/mean"], record["episode/turns/mean"]) for record in records] == [(0.75, 3.0)] * 6
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "iteration_0006.jsonl").read_text().splitlines()]
    assert {len(line["turns"]) for line in lines} == {3} and {line["outcome"] for line in lines} <= {"stop", "length"}


async def test_a_fork_trains_on_from_the_checkpoint_on_the_groups_behind_it(redis_url: str, run_id: str, tmp_path: Path) -> None:
    async with simulated_run(redis_url, run_id, tmp_path, iterations=2) as started:
        assert await started.ended(300) == ("done", ""), started.logs()
    parent = tmp_path / "run"
    (parent / "run.json").write_text(json.dumps({"run_id": run_id, "redis": EMBEDDED}))
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    config = (await started_config(redis_url, run_id)).model_copy(update={"name": "fork", "iterations": 4})
    origin = copy_start(parent, config)
    assert (origin.iteration, origin.group) == (2, 8)
    fork = simulated_run(redis_url, f"{run_id}-fork", tmp_path, first_group=origin.group, name="fork", iterations=4)
    async with fork as started:
        assert await started.ended(300) == ("done", ""), started.logs()
        log = ExperienceLog(started.run)
        plans = [await log.find_plan(iteration) for iteration in (3, 4)]
        assert [plan and plan.indices for plan in plans] == [(8, 9, 10, 11), (12, 13, 14, 15)]
        assert (await log.audit()).clean
    assert {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()} == before
    samples = (tmp_path / "fork" / "samples" / "iteration_0003.jsonl").read_text().splitlines()
    assert {json.loads(line)["group"] for line in samples} == {8, 9, 10, 11}


async def test_no_sample_file_is_missing_however_late_the_disk_takes_them(redis_url: str, run_id: str, tmp_path: Path) -> None:
    in_the_way = tmp_path / "run" / "metrics.jsonl"
    in_the_way.mkdir(parents=True)
    saves = {"save_interval": 1, "keep_checkpoints": 1}
    async with simulated_run(redis_url, run_id, tmp_path, iterations=10_000, train_seconds=0.1, trainer=saves) as started:
        log = ExperienceLog(started.run)

        async def trained_four() -> bool | None:
            return await log.version() >= 4 or None

        assert await started.run.until(trained_four, within=300), started.logs()
        in_the_way.rmdir()
        late = await log.version()
        await until(lambda: trained(started.run, late + 8))

        async def released() -> bool:
            return (await log.audit()).counts["released"] > 0

        await until(released)
        await started.run.set_state(RunState.DRAINING)
        assert (await started.ended(300))[0] == "stopped", started.logs()
        assert (await log.audit()).clean
        trained_in_all = await log.version()
    samples = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert samples == [f"iteration_{number:04d}.jsonl" for number in range(1, trained_in_all + 1)]


async def started_config(redis_url: str, run_id: str) -> RunConfig:
    redis = await connect(redis_url)
    try:
        return await Run(redis, run_id).config()
    finally:
        await redis.aclose()


async def test_a_lone_stop_of_the_orchestrator_does_not_end_the_run(redis_url: str, run_id: str, tmp_path: Path) -> None:
    async with simulated_run(redis_url, run_id, tmp_path, iterations=8, train_seconds=0.5) as started:

        async def going() -> bool:
            return any(record["iteration"] == 2 for record in await started.records("iteration"))

        await until(going)
        children = psutil.Process(started.children["train"].pid).children()
        [orchestrator] = [child for child in children if "polyreme_trainer.orchestrator" in command_line(child)]
        orchestrator.terminate()
        state, reason = await started.ended(300)
        assert (state, reason) == ("done", ""), started.logs()
        assert "orchestrator ended with status 143; restart 1" in (tmp_path / "train.log").read_text()


async def test_an_evaluation_keeps_its_version_while_training_continues(redis_url: str, run_id: str, tmp_path: Path) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("\n".join(json.dumps(row) for row in ROWS))
    async with simulated_run(
        redis_url,
        run_id,
        tmp_path,
        replica_processes=2,
        replicas=("--step-seconds", "0.01"),
        iterations=10,
        max_staleness=2,
        eval_interval=4,
        data={"eval": str(held_out)},
    ) as started:
        state, reason = await started.ended(300)
        assert (state, reason) == ("done", ""), started.logs()
        assert (await ExperienceLog(started.run).audit()).clean
        records = [record for _, record in await started.run.records("0", 0, 10_000)]
        told = [(record["kind"], record.get("version", record.get("iteration"))) for record in records]
        assert [version for kind, version in told if kind == "eval"] == [0, 4, 8, 10]
        assert not [version for kind, version in told if kind == "eval_failed"]
        for version in (4, 8):
            before = told[: told.index(("eval", version))]
            assert {v for kind, v in before if kind == "commit" and v > version} == set(), "a replica left it too early"
            assert [i for kind, i in before if kind == "iteration" and i > version], "training stalled"
        assert max(record["staleness/max"] for record in records if record["kind"] == "iteration") <= 2


async def test_replicas_are_let_go_when_an_evaluation_takes_too_long(redis_url: str, run_id: str, tmp_path: Path) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("\n".join(json.dumps(row) for row in ROWS))
    async with simulated_run(
        redis_url,
        run_id,
        tmp_path,
        replicas=("--step-seconds", "0.02"),
        iterations=6,
        max_staleness=1,
        eval_interval=3,
        eval_hold=0.1,
        data={"eval": str(held_out)},
    ) as started:
        state, reason = await started.ended(300)
        assert (state, reason) == ("done", ""), started.logs()
        assert [record["version"] for record in await started.records("eval")] == [0, 6]
        [failed] = await started.records("eval_failed")
        assert failed["version"] == 3
        assert {record["version"] for record in await started.records("commit")} >= {6}
        assert (await ExperienceLog(started.run).audit()).clean


async def test_a_stop_through_redis_saves_and_ends_the_run(redis_url: str, run_id: str, tmp_path: Path) -> None:
    notices = [
        {"kind": "command", "command": ["sh", "-c", 'echo "$POLYREME_NOTICE_TEXT"'], "events": ["stopped"], "timeout": 300}
    ]
    async with simulated_run(redis_url, run_id, tmp_path, iterations=10_000, notices=notices) as started:
        handle = await asyncio.to_thread(RunHandle, redis_url, run_id)
        await until(lambda: trained(started.run, 2))
        status = await asyncio.to_thread(handle.stop, timeout=300)
        state, reason = await started.ended(300)
        assert status.state == state == "stopped", started.logs()
        assert "of 10000 iterations" in reason
        assert (tmp_path / "run" / "notices.log").read_text() == f"run stopped: {reason}\n"
        assert handle.status().iteration == len(handle.records("iteration"))
        assert read_summary(tmp_path / "run")["state"] == "stopped"
        assert newest(tmp_path / "run" / "checkpoints").version == handle.status().iteration
        assert handle.summary()["iterations"] == len(handle.metrics())
        with pytest.raises(ConfigError):
            handle.samples()


async def trained(run: Run, iteration: int) -> bool:
    return await ExperienceLog(run).version() >= iteration


async def test_without_iterations_the_model_is_only_evaluated(redis_url: str, run_id: str, tmp_path: Path) -> None:
    data = {"eval": str(tmp_path / "train.jsonl")}
    async with simulated_run(redis_url, run_id, tmp_path, iterations=0, data=data) as started:
        assert await started.ended(300) == ("done", ""), started.logs()
        assert [record["version"] for record in await started.records("eval")] == [0]
        assert not await started.records("iteration")
        assert (await ExperienceLog(started.run).audit()).clean
