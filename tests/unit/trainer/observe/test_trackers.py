"""The points made of metrics.jsonl, and the cursor of a tracker in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from metric_rows import METRICS

from polyreme.config.run import RunConfig
from polyreme.config.trackers import PluginConfig, TrackerConfig
from polyreme.errors import PolyremeError
from polyreme_trainer.observe.trackers.follow import Cursor, cursor_path, points, read_cursor, read_lines, write_cursor
from polyreme_trainer.observe.trackers.protocol import TRACKERS, Point, TrackedRun, check_trackers, open_tracker
from support.configs import run_config


def test_a_record_is_one_point_with_its_axis() -> None:
    line = {"kind": "iteration", "iteration": 3, "time": 7.0, "reward/mean": 0.5, "staleness/samples": [2, 1], "alarms": ["x"]}
    assert list(points(line)) == [
        Point("iteration", 3, 7.0, {"reward/mean": 0.5, "staleness/samples_0": 2.0, "staleness/samples_1": 1.0})
    ]
    sft = {"kind": "sft", "phase": 2, "step": 10, "steps": 20, "loss": 0.25, "time": 1.0}
    assert list(points(sft)) == [Point("sft_step", 10, 1.0, {"sft_2/loss": 0.25})]
    commit = {"kind": "commit", "replica": "r", "version": 4, "stall_seconds": 0.5, "reload_seconds": 0.25, "time": 1.0}
    assert list(points(commit)) == [Point("iteration", 4, 1.0, {"weights/stall_seconds": 0.5, "weights/reload_seconds": 0.25})]
    step = {"kind": "step", "step": 2, "steps": 9, "loss": 0.5, "time": 1.0}
    assert list(points(step)) == [Point("step", 2, 1.0, {"train/loss": 0.5})]
    assert list(points({"kind": "notice", "text": "", "time": 1.0})) == []


def test_every_documented_number_of_a_commit_is_a_point() -> None:
    documented = {metric.name.removeprefix("weights/") for metric in METRICS if metric.when.startswith("`commit` records")}
    (point,) = points({"kind": "commit", "replica": "r", "version": 4, "time": 1.0, **dict.fromkeys(documented, 0.5)})
    assert point.values.keys() == {f"weights/{name}" for name in documented}


def test_lines_are_read_whole_and_in_bounded_parts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path, 0) == ([], 0)
    whole = "".join(json.dumps({"n": n}) + "\n" for n in range(10))
    path.write_text(whole + '{"n": 1')
    found: list[Any] = []
    offset = 0
    for _ in range(10):
        lines, offset = read_lines(path, offset, most=25)
        assert len(lines) <= 4
        found += lines
    assert found == [{"n": n} for n in range(10)]
    assert offset == len(whole)


def test_a_cursor_of_another_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    kept = Cursor("run-1", "abc", 17)
    write_cursor(tmp_path, "mlflow", kept)
    assert read_cursor(tmp_path, "mlflow", "run-1") == kept
    assert read_cursor(tmp_path, "mlflow", "run-2") == Cursor("run-2")
    assert read_cursor(tmp_path, "wandb", "run-1") == Cursor("run-1")
    cursor_path(tmp_path, "mlflow").write_text('{"run": ')
    with pytest.raises(PolyremeError):
        read_cursor(tmp_path, "mlflow", "run-1")


def test_every_kind_has_a_module_and_a_run_one_tracker_of_each(tmp_path: Path) -> None:
    kinds = {section.model_fields["kind"].annotation.__args__[0] for section in TrackerConfig.__args__[0].__args__}
    assert kinds == TRACKERS.keys() | {"plugin"}
    tree = run_config(tmp_path).model_dump(mode="json")
    with pytest.raises(ValueError, match="mlflow twice"):
        RunConfig.model_validate({**tree, "trackers": [{"kind": "mlflow"}, {"kind": "mlflow", "project": "x"}]})


def test_an_installed_package_adds_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_ledger.py").write_text(
        "class Ledger:\n"
        "    def __init__(self, section, run):\n"
        "        self.tracker_id = f\"{section.options['table']}/{run.run_id}\"\n"
    )
    (info := tmp_path / "own_ledger-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-ledger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyreme.trackers]\nledger = own_ledger:Ledger\n")
    section = PluginConfig(name="ledger", options={"table": "runs"})
    run = TrackedRun("run-1", "name", {}, tmp_path, None)
    [missing] = check_trackers([section])
    assert missing.found == "none" and "ledger" in missing.expected
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not list(check_trackers([section]))
    assert open_tracker(section, run).tracker_id == "runs/run-1"
