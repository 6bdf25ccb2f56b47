"""The status of a run directory in `polyreme status`."""

import fcntl
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from polyreme.cli.commands.status import status_lines
from polyreme.cli.main import build_app
from polyreme.errors import ConfigError
from polyreme.experience.run import RunState
from polyreme.page.answers import overview
from polyreme.rundir.progress import Progress
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import NO_REDIS, RunFile, owned, write_run_file
from polyreme.rundir.run_records import write_summary
from polyreme.rundir.run_status import RunStatus, directory_status
from polyreme.rundir.service_status import FILE, MODELS, ServiceState, model_statuses
from polyreme.terminal.terminal import aligned, fitted
from support.recorded_run import record_run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("done"))


def test_a_finished_run(done: Path) -> None:
    status = directory_status(done)
    assert (status.state, status.iteration, status.iterations) == ("done", 3, 3)
    assert (status.metric, status.value, status.reward) == ("accuracy", 0.3, 0.3)
    assert status.replicas == {} and status.ended
    assert status.updated == 2.0 * 9  # two records before the first evaluation, then two for each iteration


def test_a_running_run_shows_its_replicas_until_its_process_dies(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, end=None)
    with owned(run_dir):
        running = directory_status(run_dir)
    dead = directory_status(run_dir)
    assert (running.state, running.replicas) == ("running", {"rollout-a": 3})
    assert (dead.state, dead.replicas) == ("interrupted", {})
    assert "--resume" in dead.reason and dead.ended


def test_a_state_of_a_newer_release_is_shown(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, end=None)
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"state": "resharding"}))
    with owned(run_dir):
        status = directory_status(run_dir)
    assert (status.state, status.ended, status.replicas) == ("resharding", False, {"rollout-a": 3})


def test_looking_locks_no_finished_run(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[int] = []
    counting = SimpleNamespace(flock=lambda _, kind: locks.append(kind), LOCK_SH=fcntl.LOCK_SH, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr("polyreme.rundir.run_directory.fcntl", counting)
    directory_status(done)
    assert locks == []


def test_the_summary_of_a_replaced_run_is_not_this_runs(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path)
    write_run_file(run_dir, RunFile("another", "embedded"))
    assert directory_status(run_dir).iteration is None


def test_a_stage(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("sft-1", NO_REDIS))
    write_summary(tmp_path, "sft-1", RunState.DONE, "", {"stage": "sft", "step": 120, "steps": 120, "loss": 2.5, "updated": 7.0})
    status = directory_status(tmp_path)
    assert (status.iteration, status.iterations, status.metric, status.value) == (120, 120, "loss", 2.5)
    assert status.updated == 7.0


def test_a_replay_is_told_apart_from_training(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("sft-1", NO_REDIS))
    write_summary(tmp_path, "sft-1", RunState.RUNNING, "", {"step": 90, "steps": 120, "replayed": 12})
    with owned(tmp_path):
        [_, line] = status_lines([directory_status(tmp_path)], now=0.0)
        assert "running" in line and "90/120, replaying 12 of 90" in line
    assert directory_status(tmp_path).replayed is None, "an interrupted one replays nothing"


def test_a_run_that_learned_nothing_says_so(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("run-1", "embedded"))
    write_summary(tmp_path, "run-1", RunState.DONE, "", {"iteration": 60, "not_learned": ["nothing was learned: why", "a cause"]})
    assert status_lines([directory_status(tmp_path)], now=0.0)[-1] == "run-1: nothing was learned: why"
    assert overview("run", RunReader(tmp_path), True)["activities"] == ["nothing was learned: why", "a cause"]


def test_a_run_says_what_it_waits_for(tmp_path: Path) -> None:
    progress, waiting = (
        Progress(1),
        {"kind": "notice", "service": "orchestrator", "text": "waiting for experience", "waiting": True},
    )
    progress.add({"time": 1.0, **waiting})
    write_run_file(tmp_path, RunFile("run-1", "embedded"))
    write_summary(tmp_path, "run-1", RunState.RUNNING, "", progress.summary())
    with owned(tmp_path):
        assert status_lines([directory_status(tmp_path)], now=0.0)[-1] == "run-1: waiting for experience"
    progress.add({"time": 2.0, "kind": "rollout", "iteration": 1, "time/rollout_wait": 0.0})
    assert progress.waiting == ""


def test_each_of_several_orchestrators_is_shown_while_they_work(tmp_path: Path) -> None:
    progress = Progress(1)
    planned = {"kind": "rollout", "iteration": 1, "time/rollout_wait": 0.0}
    progress.add({"time": 1.0, **planned})
    assert progress.summary()["orchestrators"] == {}, "one is not worth a line"
    progress.add({"time": 2.0, "kind": "restart", "process": "orchestrator-1"})
    progress.add({"time": 3.0, **planned, "groups": [3, 2]})
    write_run_file(tmp_path, RunFile("run-1", "embedded"))
    write_summary(tmp_path, "run-1", RunState.RUNNING, "", progress.summary())
    with owned(tmp_path):
        line = status_lines([directory_status(tmp_path)], now=0.0)[-1]
    assert line == "run-1: orchestrator 3 groups; orchestrator-1 2 groups, 1 restarts"
    assert directory_status(tmp_path).orchestrators == {}, "they have ended with their run"


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(build_app(["status"]), ["status", str(tmp_path)]).exception, ConfigError)
    with pytest.raises(ConfigError):
        directory_status(tmp_path)


def test_the_table_gives_the_reason_below(done: Path) -> None:
    failed = RunStatus("r", "runs/r", "failed", reason="no disk\nleft")
    lines = status_lines([directory_status(done), failed], now=100.0)
    assert len(lines) == 4
    assert "3/3" in lines[1] and "accuracy 0.300" in lines[1] and "1:22 ago" in lines[1]
    assert lines[3] == "r: no disk left"
    assert status_lines([], now=0.0) == ["no runs"]


def test_columns_are_as_wide_as_their_cells() -> None:
    assert aligned(("A", "B"), [("x", "1"), ("两两", "2")]) == ["A     B", "x     1", "两两  2"]


def test_a_table_that_a_terminal_cannot_hold_is_a_block_per_row() -> None:
    header, rows = ("RUN", "STATE", "AT"), [("first", "done", "1"), ("second", "running", "2")]
    assert fitted(header, rows, None) == fitted(header, rows, 10) == aligned(header, rows)
    assert fitted(header, rows, 9) == ["RUN:", "first", "  STATE  done", "  AT     1", "second", "  STATE  running", "  AT     2"]


def test_the_command_prints_json(done: Path) -> None:
    result = CliRunner().invoke(build_app(["status"]), ["status", str(done.parent), "--json"])
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    assert json.loads(line)["state"] == "done" and json.loads(line)["value"] == 0.3


def test_a_damaged_run_hides_no_other(done: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(done, tmp_path / "whole")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    shutil.copytree(done, tmp_path / "odd")
    (tmp_path / "odd" / "summary.json").unlink()
    (tmp_path / "odd" / "summary.json").mkdir()
    result = CliRunner().invoke(build_app(["status"]), ["status", str(tmp_path), "--json"])
    assert [json.loads(line)["place"] for line in result.stdout.splitlines()] == [str(tmp_path / "whole")]
    assert str(tmp_path / "damaged") in caplog.text
    alone = CliRunner().invoke(build_app(["status"]), ["status", str(tmp_path / "damaged")])
    assert isinstance(alone.exception, ConfigError)


def test_copies_of_a_run_have_a_line_each(done: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copytree(done, tmp_path / name)
    result = CliRunner().invoke(build_app(["status"]), ["status", str(tmp_path), str(tmp_path / "first"), "--json"])
    assert [json.loads(line)["place"] for line in result.stdout.splitlines()] == [
        str(tmp_path / name) for name in ("first", "second")
    ]


def test_a_damaged_model_of_a_service_hides_no_other(done: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = {name: tmp_path / MODELS / name for name in ("whole", "damaged", "odd")}
    for folder in models.values():
        shutil.copytree(done, folder)
    (models["damaged"] / "run.json").write_text("{")
    (models["odd"] / "summary.json").unlink()
    (models["odd"] / "summary.json").mkdir()
    assert len(model_statuses(tmp_path, ServiceState("base", 1.0, {}))) == 1
    assert str(models["damaged"]) in caplog.text and str(models["odd"]) in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "{}", '{"workers": []}', '{"workers": {"learner": {"of": "later"}}}'])
def test_a_file_of_another_form_is_no_service(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert ServiceState.read(tmp_path) is None
