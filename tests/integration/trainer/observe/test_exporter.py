"""The trainer's HTTP port: a real run in a real Redis, queried by a real client."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.experience.metric_records import VersionServed
from polyreme.experience.run import Run, RunState
from polyreme.page.threads import WAITING
from polyreme.rundir.progress import Progress
from polyreme_trainer.observe.exporter import Exporter, export, snapshot
from support.record_lines import read_known
from support.seeded_run import record_run
from support.waiting import until

ITERATION = {
    "kind": "iteration",
    "iteration": 3,
    "reward/mean": 0.5,
    "time/iteration": 4.0,
    "time/learner_wait": 1.0,
    "alarms": ["x"],
}


def test_every_number_of_the_newest_iteration_is_a_gauge() -> None:
    progress = Progress(8)
    progress.add({"time": 1.0, **ITERATION, "iteration": 2, "reward/mean": 0.1})
    progress.add({"time": 2.0, **ITERATION})
    rollout = {"kind": "rollout", "iteration": 3, "time/rollout_wait": 0.25}
    for record in (rollout, *2 * [{"kind": "alarm", "text": "x"}]):
        progress.add({"time": 2.0, **record})
    shown = snapshot(RunState.RUNNING, progress)
    assert shown.gauges == {
        "alarms": 2.0,
        "iteration": 3.0,
        "reward_mean": 0.5,
        "time_iteration_seconds": 4.0,
        "time_learner_wait_seconds": 1.0,
        "time_rollout_wait_seconds": 0.25,
        "learner_wait_ratio": 0.25,
    }


async def test_probes_are_open_and_metrics_need_the_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYREME_TEST_TOKEN", "right")
    config = (await run.config()).model_copy(update={"security": SecurityConfig(token_env="POLYREME_TEST_TOKEN")})
    async with export(run, config, "127.0.0.1", 0) as port, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port}"
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.get(f"{url}/ready")).status_code == 503
        assert (await client.get(f"{url}/metrics")).status_code == 401
        await run.set_state(RunState.RUNNING)
        await run.emit(read_known(ITERATION))
        await run.emit(VersionServed(replica="r1", version=3))
        header = {"authorization": "Bearer right"}
        text = ""

        async def shown() -> bool:
            nonlocal text
            text = (await client.get(f"{url}/metrics", headers=header)).text
            return "polyreme_train_replica_version{" in text

        await until(shown)
        assert "polyreme_train_reward_mean 0.5" in text
        assert 'polyreme_train_state{state="running"} 1.0' in text
        assert 'polyreme_train_replica_version{replica="r1"} 3.0' in text
        assert "polyreme_memory_bytes" in text
        assert (await client.get(f"{url}/ready")).status_code == 200
        assert (await client.get(f"{url}/else", headers=header)).status_code == 404
        with pytest.raises(ConfigError, match=f"a free port {port}"):
            async with export(run, config, "127.0.0.1", port):
                pass


async def test_records_that_are_on_disk_and_gone_from_redis_are_shown(run: Run, tmp_path: Path) -> None:
    config = await run.config()
    config.run_dir.mkdir(parents=True)
    line = {"run": run.run_id, "id": "5-0", "time": 1.0, **ITERATION}
    (config.run_dir / "metrics.jsonl").write_text(
        json.dumps(line) + "\n" + json.dumps({**line, "run": "another", "iteration": 9}) + "\n"
    )
    exporter = Exporter(run, config)
    following = asyncio.create_task(exporter.keep_current())
    try:
        async with asyncio.timeout(300):
            while not exporter.shown.gauges:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        following.cancel()
    assert exporter.shown.gauges["iteration"] == 3.0


async def test_the_run_page_is_there_and_its_data_need_the_token(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(record_run, tmp_path / "shown", 2, 1)
    monkeypatch.setenv("POLYREME_TEST_TOKEN", "right")
    changes = {"security": SecurityConfig(token_env="POLYREME_TEST_TOKEN"), "output_dir": tmp_path, "name": "shown"}
    config = (await run.config()).model_copy(update=changes)
    async with export(run, config, "127.0.0.1", 0) as port, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port}/ui"
        page = await client.get(f"{url}/")
        assert page.status_code == 200
        for asset in re.findall(r'src="(static/[^"]+)"', page.text):
            assert (await client.get(f"{url}/{asset}")).status_code == 200
        assert (await client.get(f"{url}/api/runs")).status_code == 401

        async def shown() -> bool:
            answer = await client.get(f"{url}/api/runs", headers={"authorization": "Bearer right"})
            return [(each["name"], each["iteration"]) for each in answer.json()] == [("shown", 2)]

        await until(shown)


async def test_no_port_no_server(run: Run, tmp_path: Path) -> None:
    async with export(run, await run.config(), "127.0.0.1", None) as port:
        assert port is None


async def test_clients_that_do_not_read_hold_neither_probes_nor_metrics(run: Run) -> None:
    config = await run.config()
    await asyncio.to_thread(record_run, config.run_dir, 40, 1)
    async with export(run, config, "127.0.0.1", 0) as port, httpx.AsyncClient(trust_env=False, timeout=300) as client:
        question = f"GET /ui/api/runs/{config.run_dir.name}/samples?limit=500 HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        slow = [await asyncio.open_connection("127.0.0.1", port, limit=1) for _ in range(2 * WAITING)]
        try:
            for _, writer in slow:
                writer.write(3 * question)
                await writer.drain()
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
            assert "polyreme_train_state" in (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        finally:
            for _, writer in slow:
                writer.transport.abort()
