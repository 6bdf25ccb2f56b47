"""The files of records: each record is written once, despite crashes in between."""

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.config.run import RunConfig
from polyreme.errors import DataError, StoreError
from polyreme.experience.record_checks import check_group
from polyreme.experience.record_codec import TrainedSamples, decode_group, encode_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardCall, RewardPart, SampleRecord, ToolCall, Turn
from polyreme.experience.run import RunState
from polyreme.rundir.reader.scalars import scalars
from polyreme.rundir.run_records import read_summary, write_end
from polyreme_trainer.observe.records import Recorder, cut_torn_line, of_samples, sample_lines
from support.configs import run_config

Stream = list[tuple[str, dict[str, Any]]]
RUNNING = (RunState.RUNNING, "")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = run_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    return config


def group(index: int) -> bytes:
    def sample(score: float) -> SampleRecord:
        return SampleRecord(
            token_ids=np.arange(3, dtype=np.int32),
            logprobs=np.full(3, -0.5, dtype=np.float32),
            loss_mask=np.ones(3, dtype=np.uint8),
            finish_reason=pb.FINISH_REASON_STOP,
            spans=[(0, 0, 3)],
            score=score,
            parts=[RewardPart("exact", score, score / 2), RewardPart("exact/length", 3.0, 1.5)],
            text="#5",
            replicas=("rollout-1",),
            calls=(RewardCall("reward-1", "ok", "", 0.25),),
        )

    prompt_ids = np.arange(4, dtype=np.int32)
    return encode_group(GroupRecord(index, 1, prompt_ids, [sample(1.0), sample(0.0)], "a2b3=", "5"))


async def groups_of(iteration: int) -> tuple[list[bytes], bytes | None]:
    return [group(4 * iteration + place) for place in range(4)], None


async def no_groups(iteration: int) -> tuple[list[bytes], bytes | None]:
    raise StoreError(f"the groups of iteration {iteration}", "no payload", "They are released.")


def iteration(number: int, **fields: Any) -> dict[str, Any]:
    times = {"time/iteration": 2.0, "time/learner_wait": 1.0, "time/train": 0.5, "time/write": 0.1}
    return {"kind": "iteration", "iteration": number, "reward/mean": 0.5, **times, **fields}


def stream(*records: dict[str, Any]) -> Stream:
    return [(f"{1000 + 2000 * place}-0", record) for place, record in enumerate(records)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_record_becomes_a_line_with_its_time(config: RunConfig) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(stream({"kind": "notice", "service": "rollout", "text": "joined"}), RUNNING)
    [line] = lines(config.run_dir / "metrics.jsonl")
    assert line == {"run": "run-1", "id": "1000-0", "time": 1.0, "kind": "notice", "service": "rollout", "text": "joined"}


async def test_a_restart_goes_on_behind_the_last_whole_line(config: RunConfig) -> None:
    records = stream(iteration(1), iteration(2), iteration(3))
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(records[:2], RUNNING)
    metrics = config.run_dir / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-7])  # the crash tore the second line
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        assert recorder.cursor == records[0][0]
        await recorder.take([entry for entry in records if entry[0] > recorder.cursor], RUNNING)
    assert [line["iteration"] for line in lines(metrics)] == [1, 2, 3]
    assert json.loads((config.run_dir / "summary.json").read_text())["iterations"] == 3


async def test_a_run_differs_from_one_that_failed_in_its_directory_before(config: RunConfig) -> None:
    """The stream is read from the first record, even if the clock of its Redis is behind."""
    evaluation = {"kind": "eval", "version": 2, "samples": 10, "seconds": 1.0}
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(
            stream(iteration(1), iteration(2), iteration(3), iteration(4), {**evaluation, "accuracy": 0.25}), RUNNING
        )
    second = stream({**evaluation, "accuracy": 0.75}, iteration(3))  # of the checkpoint of iteration 2
    for records in (second[:1], second[1:]):
        with closing(Recorder.open(config.run_dir, "run-2", config.samples_per_iteration, groups_of)) as recorder:
            assert recorder.cursor == ("0" if records == second[:1] else second[0][0])
            await recorder.take(records, RUNNING)
    metrics = lines(config.run_dir / "metrics.jsonl")
    assert [(line["run"], line.get("iteration")) for line in metrics if line["kind"] == "iteration"] == [
        *(("run-1", number) for number in (1, 2, 3, 4)),
        ("run-2", 3),
    ]
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["iterations"], summary["evaluations"]) == (1, {"2": 0.75})
    assert {path.name for path in (config.run_dir / "tensorboard").iterdir()} == {"run-1", "run-2"}


async def test_samples_of_an_iteration_come_from_the_log(config: RunConfig) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(stream(iteration(1)), RUNNING)
    samples = lines(config.run_dir / "samples" / "iteration_0001.jsonl")
    assert len(samples) == 8
    assert samples[1] == {
        "iteration": 1,
        "group": 4,
        "attempt": 1,
        "sample": 1,
        "prompt": "a2b3=",
        "response": "#5",
        "label": "5",
        "score": 0.0,
        "parts": {"exact": {"raw": 0.0, "weighted": 0.0}, "exact/length": {"raw": 3.0, "weighted": 1.5}},
        "tokens": 3,
        "finish_reason": "stop",
        "spans": [[0, 0, 3]],
        "prompt_tokens": 4,
        "replicas": ["rollout-1"],
        "calls": [{"server": "reward-1", "status": "ok", "message": "", "seconds": 0.25}],
        "token_ids": [0, 1, 2],
        "logprobs": [-0.5, -0.5, -0.5],
    }


async def test_a_sample_has_what_its_iteration_did_with_it(config: RunConfig) -> None:
    advantages = np.repeat(np.linspace(-1, 1, 8), 3).astype(np.float32)
    advantages[:3] = (0.25, 0.5, 0.75)
    used = TrainedSamples(advantages, np.full(8, 0.125, np.float32), np.tile(np.array([1, 3], np.int32), (8, 1)))

    async def of(iteration: int) -> tuple[list[bytes], bytes | None]:
        return (await groups_of(iteration))[0], used.encode()

    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, of)) as recorder:
        await recorder.take(stream(iteration(1)), RUNNING)
    first, second, *_ = lines(config.run_dir / "samples" / "iteration_0001.jsonl")
    assert first["advantage"] == [0.25, 0.5, 0.75], "advantages that differ within a sample are all there"
    assert second["advantage"] == pytest.approx(-5 / 7, rel=1e-4) and second["weight"] == 0.125
    assert first["optimizer_steps"] == [1, 3]


def test_advantages_of_a_trajectory_stand_at_its_sampled_tokens() -> None:
    """Token 1 of three is the environment's. The learner's result has the sampled tokens alone."""
    plain = decode_group(group(1))
    outside = np.array([False, True, False])
    parts = replace(
        plain.samples[0],
        turns=(Turn(0, 1), Turn(2, 3)),
        loss_mask=np.where(outside, np.uint8(0), np.uint8(1)),
        logprobs=np.where(outside, np.float32(0), np.float32(-0.5)),
        spans=[(0, 0, 1), (0, 2, 3)],
    )
    played = replace(plain, samples=[parts], episodes=[EpisodeRecord(pb.OUTCOME_STOP)])
    check_group(played)
    used = TrainedSamples(np.array([0.5, -1.0], np.float32), np.ones(1, np.float32), np.ones((1, 1), np.int32))
    assert of_samples([played], used.encode())[0]["advantage"] == [0.5, 0.0, -1.0]


def test_what_belongs_to_other_samples_is_refused() -> None:
    used = TrainedSamples(np.zeros(3, np.float32), np.ones(1, np.float32), np.ones((1, 1), np.int32))
    assert TrainedSamples.decode(used.encode()).steps.tolist() == [[1]]
    with pytest.raises(DataError):
        list(used.fields([2]))
    with pytest.raises(DataError):
        TrainedSamples.decode(b"\xff\xff")


def test_a_sample_has_its_numbers_per_token_where_there_are_some() -> None:
    plain = decode_group(group(1))
    assert not {"token_rewards", "teacher_logprobs"} & next(sample_lines(plain)).keys()
    numbers = np.linspace(0, 1, len(plain.samples[0]), dtype=np.float32)
    (line,) = sample_lines(replace(plain, samples=[replace(plain.samples[0], token_rewards=numbers)]))
    assert line["token_rewards"] == numbers.tolist() and "teacher_logprobs" not in line


def test_a_trajectory_has_its_episode_and_its_turns() -> None:
    plain = decode_group(group(1))
    turn = Turn(0, len(plain.samples[0]), 0.5, 0.1, (ToolCall("add", "{}", "3"),))
    messages = [{"role": "user", "content": "a2b3="}]
    episode = EpisodeRecord(pb.OUTCOME_TURNS, json.dumps(messages), 0.25)
    (line,) = sample_lines(replace(plain, samples=[replace(plain.samples[0], turns=(turn,))], episodes=[episode]))
    assert (line["episode"], line["outcome"], line["environment_seconds"]) == (0, "turns", 0.25)
    call = {"name": "add", "arguments": "{}", "result": "3", "seconds": 0.0, "error": ""}
    assert line["turns"] == [{"start": 0, "end": turn.end, "reward": 0.5, "seconds": 0.1, "tool_calls": [call]}]
    assert line["messages"] == messages and "trajectories" not in line
    branches = [replace(plain.samples[0], turns=(turn,)) for _ in range(2)]
    two = list(sample_lines(replace(plain, samples=branches, episodes=[episode])))
    assert [(each["trajectory"], each["trajectories"]) for each in two] == [(0, [0, 1]), (1, [0, 1])]


async def test_groups_that_are_gone_cost_their_sample_file_only(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, no_groups)) as recorder:
        await recorder.take(stream(iteration(1)), RUNNING)
    assert not list((config.run_dir / "samples").iterdir())
    assert len(lines(config.run_dir / "metrics.jsonl")) == 1
    assert "sample file of iteration 1" in caplog.text


async def test_an_iteration_that_is_repeated_after_a_resume_is_on_record_once(config: RunConfig) -> None:
    """The first record is kept, since only it includes the waits."""
    records = stream(iteration(1), iteration(2), iteration(2, **{"time/iteration": 0.01}), iteration(3))
    for at in range(4):
        with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
            await recorder.take(records[at : at + 1], RUNNING)
    metrics = lines(config.run_dir / "metrics.jsonl")
    assert [(line["iteration"], line["time/iteration"]) for line in metrics] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert [line["next_group"] for line in metrics] == [8, 12, 16]
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        assert recorder.progress.newest == 3


async def test_the_summary_says_how_the_run_is_doing(config: RunConfig) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take([], (RunState.STARTING, ""))
        assert json.loads((config.run_dir / "summary.json").read_text())["state"] == "starting"
        await recorder.take(stream(iteration(1)), RUNNING)
        await recorder.take([], (RunState.DRAINING, "stop requested"))
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["run"], summary["state"], summary["reason"]) == ("run-1", "draining", "stop requested")
    write_end(config.run_dir, "run-1", RunState.STOPPED, "1 of 8")
    ended = json.loads((config.run_dir / "summary.json").read_text())
    assert ended == {**summary, "state": "stopped", "reason": "1 of 8"}
    write_end(config.run_dir, "run-2", RunState.FAILED, "no data")
    assert read_summary(config.run_dir) == {"run": "run-2", "state": "failed", "reason": "no data"}


@pytest.mark.parametrize(("content", "kept"), [(b"a\nb\ntorn", b"a\nb\n"), (b"torn", b""), (b"a\n", b"a\n"), (b"", b"")])
@pytest.mark.parametrize("tail", [1, 3, 1 << 16])
def test_a_torn_line_is_cut(content: bytes, kept: bytes, tail: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    cut_torn_line(path, tail)
    assert path.read_bytes() == kept


async def test_the_summary_counts_a_replayed_iteration_once(config: RunConfig) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(
            stream(
                {"kind": "sft_done", "seconds": 7.0},
                {"kind": "eval", "version": 0, "accuracy": 0.25, "samples": 10, "seconds": 1.0},
                iteration(1),
                iteration(2),
                iteration(2),
                {"kind": "eval", "version": 2, "accuracy": 0.75, "samples": 10, "seconds": 1.0},
                {"kind": "saved", "iteration": 2, "path": "checkpoints/2", "hf_path": "hf/2"},
            ),
            RUNNING,
        )
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] == 0.25
    assert summary["accuracy_after"] == 0.75
    assert summary["sft_seconds"] == 7.0
    assert summary["rl_seconds"] == 4.0
    assert summary["iterations"] == 2
    assert summary["samples_per_second"] == 4.0
    assert summary["time_split"] == {"waiting for samples": 2.0, "training": 1.0, "writing weights": 0.2, "other": 0.8}
    assert summary["hf_path"] == "hf/2"


async def test_a_replay_is_in_the_summary_and_not_in_the_records(config: RunConfig) -> None:
    def summary() -> tuple[int, int | None]:
        found = json.loads((config.run_dir / "summary.json").read_text())
        return found["iteration"], found["replayed"]

    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(stream(*(iteration(number) for number in (1, 2, 3))), RUNNING)
        assert summary() == (3, None)
        await recorder.take(stream({"kind": "start", "start": 2}, {"kind": "resumed", "iteration": 0}), RUNNING)
        assert summary() == (3, 0)
        await recorder.take(stream(iteration(1), {"kind": "commit", "replica": "a", "version": 1}), RUNNING)
        assert summary() == (3, 1)
        await recorder.take(stream(iteration(2)), RUNNING)
        assert summary() == (3, 2)
        await recorder.take(stream(iteration(3)), RUNNING)
        assert summary() == (3, None)
    kinds = [json.loads(line)["kind"] for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("iteration") == 3


async def test_tensorboard_has_the_events(config: RunConfig) -> None:
    with closing(Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(stream(iteration(1)), RUNNING)
    [events] = (config.run_dir / "tensorboard" / "run-1").iterdir()
    assert b"reward/mean" in events.read_bytes()


ON_A_FULL_DISK = """
import asyncio, json, os, resource, sys, threading
from contextlib import suppress
from pathlib import Path
from polyreme.rundir.progress import stream_time
from polyreme.experience.run import RunState
from polyreme_trainer.observe.records import Recorder
from support.configs import run_config

async def no_groups(iteration):
    return [], None

async def main(folder, records):
    config, refused, open_files = run_config(folder), 0, []
    for limit in (4096, 4096, resource.RLIM_INFINITY):
        recorder = Recorder.open(config.run_dir, "run-1", config.samples_per_iteration, no_groups)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            for record in records:
                if stream_time(record[0]) > stream_time(recorder.cursor):
                    await recorder.take([record], (RunState.RUNNING, ""))
        except OSError:
            refused += 1
        with suppress(OSError):
            recorder.close()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert "torch" not in sys.modules, "seconds of the supervisor's start"
    assert (refused, threading.active_count(), len(set(open_files))) == (2, 1, 1), (refused, threading.enumerate(), open_files)

asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the process's open files in /proc")
@pytest.mark.parametrize("kind", ["iteration", "notice"])  # whose events or line do not fit
def test_a_full_disk_is_reported_each_time_and_all_is_written_once_there_is_room(
    config: RunConfig, tmp_path: Path, kind: str
) -> None:
    plotted = [iteration(number, **{f"a{place}": 1 for place in range(20)}) for number in range(1, 16)]
    records = stream(*plotted) if kind == "iteration" else stream({"kind": kind, "service": "rollout", "text": 5000 * "."})
    process = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path), json.dumps(records)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert [line["id"] for line in lines(config.run_dir / "metrics.jsonl")] == [at for at, _ in records]
    events = b"".join(path.read_bytes() for path in (config.run_dir / "tensorboard" / "run-1").iterdir())
    assert events.count(b"reward/mean") >= (len(plotted) if kind == "iteration" else 0)


def test_staleness_and_waits_are_plotted() -> None:
    line = {"time": 1.0, **iteration(3, **{"staleness/samples": [5, 3]})}
    assert {("staleness/samples_0", 5.0, 3), ("staleness/samples_1", 3.0, 3)} <= set(scalars(line))
    record = {
        "kind": "rollout",
        "id": "5-0",
        "iteration": 3,
        "time": 9.0,
        "time/rollout_wait": 0.5,
        "rollout/skipped_prompts": 2.0,
    }
    assert list(scalars(record)) == [("time/rollout_wait", 0.5, 3), ("rollout/skipped_prompts", 2.0, 3)]


def test_only_finite_numbers_are_plotted() -> None:
    line = {"time": 1.0, **iteration(3, alarms=["constant reward"], entropy=None, lr=1e-4)}
    assert ("lr", 1e-4, 3) in list(scalars(line))
    assert {tag for tag, _, _ in scalars(line)} == {
        "lr",
        "reward/mean",
        "time/iteration",
        "time/learner_wait",
        "time/train",
        "time/write",
    }
