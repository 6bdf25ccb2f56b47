"""Trackers with their real packages, offline: every record arrives once, over stops and resumes, and failures delay nothing."""

import asyncio
import json
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from polyreme.config.run import RunConfig
from polyreme.config.trackers import MlflowConfig, TrackerConfig
from polyreme.experience.metric_records import MetricRecord, TrackerFailed, fields_of
from polyreme_trainer.launch.tracker_processes import TrackerProcesses
from polyreme_trainer.observe.trackers.follow import read_cursor
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun, open_tracker
from support.configs import run_config
from support.processes import command_line
from support.simulated import ROWS, config_tree
from support.simulated_run import simulated_run

pytestmark = pytest.mark.real

RUN = "run-20261122-1"
SECONDS = 300
_BLOCK = 32768


def config_with(folder: Path, **tracker: Any) -> RunConfig:
    """A run directory with a configuration that has one tracker. Skips if its package is not installed."""
    section = TypeAdapter(TrackerConfig).validate_python(tracker)
    if find_spec(section.module) is None:
        pytest.skip(f"{section.package} is not installed; requirements/trackers.txt has it")
    config = run_config(folder, trackers=[section])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    return config


def write(config: RunConfig, *records: dict[str, Any]) -> None:
    with open(config.run_dir / "metrics.jsonl", "a") as file:
        for record in records:
            file.write(json.dumps({"run": RUN, "id": "1-0", "time": 1000.0, **record}) + "\n")


def iteration(number: int) -> dict[str, Any]:
    return {"kind": "iteration", "iteration": number, "reward/mean": number / 4, "timing/all": 2.0, "alarms": []}


EVAL = {"kind": "eval", "version": 1, "accuracy": 0.5, "samples": 4, "seconds": 1.0}
SFT = {"kind": "sft", "phase": 1, "step": 10, "steps": 20, "loss": 0.7, "lr": 1e-3}


def send(config: RunConfig) -> None:
    """Runs the tracker's process, which sends the existing records and ends."""
    words = [sys.executable, "-m", "polyreme_trainer.observe.trackers", config.run_dir, RUN, config.trackers[0].kind, "--last"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]


def send_twice(config: RunConfig) -> None:
    """Sends in two starts of a run, with records before, between and after them."""
    write(config, SFT, iteration(1), {"kind": "notice", "service": "rollout", "text": "joined"}, EVAL)
    send(config)
    write(config, iteration(2))
    send(config)
    send(config)  # nothing is new


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_mlflow_continues_its_run(folder: Path) -> None:
    config = config_with(folder, kind="mlflow", project="tests")
    send_twice(config)
    store = config.run_dir / "trackers" / "mlflow"
    [run] = [
        path for path in store.glob("*/*/meta.yaml") if path.parent.name == read_cursor(config.run_dir, "mlflow", RUN).tracker_id
    ]
    assert "run_name: run\n" in run.read_text()
    found = [line.split() for line in (run.parent / "metrics" / "reward" / "mean").read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step in found] == [(0.25, 1), (0.5, 2)]
    assert (run.parent / "metrics" / "sft_1" / "loss").read_text().split()[1:] == ["0.7", "10"]
    assert (run.parent / "params" / "trainer.optimizer.lr").read_text() == "0.001"
    assert len(list(store.glob("*/*/meta.yaml"))) == 1


def test_trackio_continues_its_run(folder: Path) -> None:
    config = config_with(folder, kind="trackio", project="tests")
    send_twice(config)
    [database] = (config.run_dir / "trackers" / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {RUN}
    values = [(step, json.loads(found)) for _, step, found in rows]
    assert [(step, found["reward/mean"]) for step, found in values if "reward/mean" in found] == [(1, 0.25), (2, 0.5)]


def test_wandb_writes_every_start_under_one_id(folder: Path) -> None:
    config = config_with(folder, kind="wandb", project="tests", mode="offline")
    send_twice(config)
    files = sorted((config.run_dir / "trackers" / "wandb").glob(f"wandb/offline-run-*/run-{RUN}.wandb"))
    records = [record for path in files for record in wandb_records(path)]
    history = [{item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in record.history.item} for record in records if record.HasField("history")]  # fmt: skip
    assert [(row["iteration"], row["reward/mean"]) for row in history if "reward/mean" in row] == [(1, 0.25), (2, 0.5)]
    assert [row["sft_step"] for row in history if "sft_1/loss" in row] == [10]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(RUN, "tests", "run")}
    assert any(update.key == "group_size" and update.value_json == "2" for run in runs for update in run.config.update)


def wandb_records(path: Path) -> Iterator[Any]:
    """The content of a W&B file: protobuf records in LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := _BLOCK - place % _BLOCK) < 7:  # the end of a block, too short for a record's header
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_swanlab_writes_a_folder_of_every_start(folder: Path) -> None:
    config = config_with(folder, kind="swanlab", project="tests", mode="offline")
    send_twice(config)
    runs = sorted((config.run_dir / "trackers" / "swanlab").glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime_ns)
    assert [b"reward/mean" in path.read_bytes() for path in runs] == [True, True, False]
    assert b"sft_1/loss" in runs[0].read_bytes() and b"sft_1/loss" not in runs[1].read_bytes()


async def test_a_tracker_that_fails_is_a_notice_once_and_counted(folder: Path) -> None:
    config = config_with(folder, kind="mlflow", uri="nowhere://x")
    write(config, iteration(1))
    emitted: list[dict[str, Any]] = []
    twice = asyncio.Event()

    async def emit(record: MetricRecord) -> None:
        emitted.append(fields_of(record))
        if isinstance(record, TrackerFailed) and record.failures == 2:
            twice.set()

    trackers = TrackerProcesses(config, RUN, emit)
    trackers.start()
    async with asyncio.timeout(SECONDS):
        await twice.wait()
    await trackers.close(0.0)
    assert [record["failures"] for record in emitted if record["kind"] == "tracker_failed"] == [1, 2]
    first, last = [record["text"] for record in emitted if record["kind"] == "notice"]
    assert "mlflow failed" in first and "nowhere" in first
    assert "lacks the newest records" in last


async def test_a_tracker_that_never_answers_has_a_deadline_at_the_end(folder: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        config = config_with(folder, kind="mlflow", uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        write(config, iteration(1))
        emitted: list[dict[str, Any]] = []

        async def emit(record: MetricRecord) -> None:
            emitted.append(fields_of(record))

        trackers = TrackerProcesses(config, RUN, emit)
        trackers.start()
        loop = asyncio.get_running_loop()
        connection, _ = await loop.run_in_executor(None, silent.accept)  # it is waiting for an answer now
        with connection:
            async with asyncio.timeout(SECONDS):
                await trackers.close(0.5)
    assert trackers.each[0].ended
    assert [record["kind"] for record in emitted] == ["notice"]


async def test_a_stop_lets_the_tracker_take_everything(folder: Path) -> None:
    config = config_with(folder, kind="mlflow")
    write(config, iteration(1))

    async def emit(record: MetricRecord) -> None:
        raise AssertionError(record)

    trackers = TrackerProcesses(config, RUN, emit)
    trackers.start()
    await asyncio.sleep(0)  # its process exists, but may not have run any code yet
    write(config, iteration(2))
    await trackers.close(SECONDS)
    assert not trackers.each[0].behind


async def test_a_tracker_that_was_stopped_from_outside_gets_the_rest_at_the_end(folder: Path) -> None:
    config = config_with(folder, kind="mlflow", project="tests")
    write(config, iteration(1))
    emitted: list[MetricRecord] = []

    async def emit(record: MetricRecord) -> None:
        emitted.append(record)

    trackers = TrackerProcesses(config, RUN, emit)
    [tracker] = trackers.each
    trackers.start()
    async with asyncio.timeout(SECONDS):
        while tracker.behind:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        [process] = [child for child in psutil.Process().children() if str(config.run_dir) in command_line(child)]
        process.terminate()
        while not tracker.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    write(config, iteration(2))
    await trackers.close(SECONDS)
    assert not tracker.behind, emitted


async def test_a_whole_run_reaches_its_tracker(redis_url: str, run_id: str, tmp_path: Path) -> None:
    """From the trainer's start to its end, the tracker's process sends everything without a failure."""
    if find_spec("mlflow") is None:
        pytest.skip("mlflow-skinny is not installed; requirements/trackers.txt has it")
    trackers = [{"kind": "mlflow", "project": "tests"}]
    config = config_tree(tmp_path, ROWS, iterations=3, trackers=trackers)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    async with simulated_run(redis_url, run_id, tmp_path, iterations=3, trackers=trackers) as started:
        assert await started.ended(SECONDS) == ("done", ""), started.logs()
    [series] = (config.run_dir / "trackers" / "mlflow").glob("*/*/metrics/timing/all")
    assert [int(line.split()[2]) for line in series.read_text().splitlines()] == [1, 2, 3]
    assert read_cursor(config.run_dir, "mlflow", run_id).offset == (config.run_dir / "metrics.jsonl").stat().st_size
    assert json.loads((config.run_dir / "summary.json").read_text())["tracker_failures"] == {}


def test_mlflow_takes_every_name(tmp_path: Path) -> None:
    """Several answers give pass@4, a reward its parts, and a user names them."""
    pytest.importorskip("mlflow")
    names = [
        "accuracy",
        "pass@4",
        "reward/exact",
        "reward/exact/len",
        "reward/exact/len/a",
        "reward/质量 (x+y)",
        "p/../q",
        "a//b",
        "l" * 300,
    ]
    tracker = open_tracker(MlflowConfig(), TrackedRun("run-1", "name", {}, tmp_path, None))
    tracker.log(Point("iteration", 1, 1.0, dict.fromkeys(names, 0.5)))
    written = {str(path.relative_to(path.parents[0])) for path in tmp_path.glob("*/*/metrics/**/*") if path.is_file()}
    assert {"accuracy", "pass_4", "exact", "exact.len", "exact.len.a"} <= written and len(written) == len(names)
