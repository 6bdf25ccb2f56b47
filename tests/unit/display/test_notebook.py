"""`polyreme.Run` on a run directory."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

import polyreme
from polyreme.display.notebook import RunHandle, to_table
from polyreme.errors import ConfigError
from polyreme.experience.run import RunState
from polyreme.rundir.run_directory import NO_REDIS, RunFile, owned, write_run_file
from polyreme.rundir.run_records import write_end, write_summary
from support.recorded_run import record_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("notebook"))


def test_the_package_has_it() -> None:
    assert polyreme.Run is RunHandle
    with pytest.raises(AttributeError):
        polyreme.Runs  # type: ignore[attr-defined]  # noqa: B018


def test_metrics_are_a_table_with_a_row_per_iteration(run_dir: Path) -> None:
    run = polyreme.Run(run_dir)
    metrics = run.metrics()
    assert isinstance(metrics, pandas.DataFrame)
    assert list(metrics["iteration"]) == [1, 2, 3]
    assert list(metrics["reward/mean"]) == pytest.approx([0.1, 0.2, 0.3])
    other = run.metrics("eval", library="polars")
    assert isinstance(other, polars.DataFrame)
    assert other["version"].to_list() == [0, 1, 2, 3]


def test_a_repeated_iteration_is_one_row(run_dir: Path, tmp_path: Path) -> None:
    copy = record_run(tmp_path)
    with open(copy / "metrics.jsonl", "a") as file:
        file.writelines(line for line in (copy / "metrics.jsonl").read_text().splitlines(True) if '"iteration": 2' in line)
        file.write('{"torn": ')
    assert list(polyreme.Run(copy).metrics()["iteration"]) == [1, 2, 3]


def test_samples_are_filtered(run_dir: Path) -> None:
    run = polyreme.Run(str(run_dir))
    assert len(run.samples()) == 24
    assert set(run.samples(iterations=(2, 2), reward=(1, 1))["tokens"]) == {2}
    assert len(run.samples(limit=5, library="polars")) == 5
    assert run.samples().loc[0, "parts.exact.raw"] == 1.0


def test_summary_config_and_status(run_dir: Path) -> None:
    run = polyreme.Run(run_dir)
    assert run.summary()["accuracy_after"] == 0.3
    assert run.config()["group_size"] == 2
    assert run.status().state == "done"
    assert "done, iteration 3 of 3" in repr(run)


def test_following_yields_what_comes_until_the_end(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, end=None)
    run = polyreme.Run(run_dir)
    with owned(run_dir):
        records = run.follow(timeout=300)
        first = [next(records)["kind"] for _ in range(2)]
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(f'{{"run": "{run.run_id}", "kind": "notice", "time": 1.0}}\n{{"run": "another", "kind": "notice"}}\n')
        write_end(run_dir, run.run_id, RunState.STOPPED, "stop requested")
        rest = [record["kind"] for record in records]
    assert first == ["start", "commit"]
    assert rest[-1] == "notice" and rest.count("notice") == 1


def test_a_finished_run_stays_as_it_is(run_dir: Path) -> None:
    before = (run_dir / "summary.json").read_bytes()
    assert polyreme.Run(run_dir).stop().state == "done"
    assert (run_dir / "summary.json").read_bytes() == before


def test_a_stage_can_be_read_but_not_stopped(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("sft-1", NO_REDIS))
    write_summary(tmp_path, "sft-1", RunState.RUNNING, "", {"step": 1, "steps": 2, "loss": 2.5})
    (tmp_path / "config.yaml").write_text("stage: sft\n")
    (tmp_path / "metrics.jsonl").write_text('{"run": "sft-1", "kind": "step", "step": 1, "loss": 2.5}\n')
    run = polyreme.Run(tmp_path)
    assert list(run.metrics("step")["loss"]) == [2.5]
    with pytest.raises(ConfigError):
        run.watch()
    with owned(tmp_path), pytest.raises(ConfigError):
        run.stop()


def test_no_run_and_a_run_id_for_a_directory_are_errors(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        polyreme.Run(tmp_path)
    with pytest.raises(ConfigError):
        polyreme.Run(run_dir, run_id="another")
    with pytest.raises(ConfigError) as error:
        polyreme.Run("http://127.0.0.1:8000/ui")
    assert "redis://" in error.value.expected and error.value.found == "http://..."


async def test_it_works_where_an_event_loop_runs(run_dir: Path) -> None:
    await asyncio.sleep(0)
    assert len(polyreme.Run(run_dir).metrics()) == 3


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    with pytest.raises(ConfigError):
        to_table([{"a": 1}], "pandas")
    with pytest.raises(ConfigError):
        to_table([{"a": 1}])


def test_nested_values_are_columns_and_missing_ones_null() -> None:
    rows: list[dict[str, Any]] = [{"a": 1, "b": {"c": 2, "d": {"e": [3]}}}, {"a": None, "b": {}}]
    assert to_table(rows, "polars").to_dicts() == [{"a": 1, "b.c": 2, "b.d.e": [3]}, {"a": None, "b.c": None, "b.d.e": None}]
