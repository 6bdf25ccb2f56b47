"""The day of a template's date is the one on which a run started, also after a resume and in a fork."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.rundir import start
from polyreme.rundir.run_directory import EMBEDDED, RunFile, claim, write_run_file
from polyreme.rundir.start import prepared
from polyreme.rundir.start_day import dated, day_of_export, first_day
from support.configs import run_config

OLD, OTHER = "run-20250102-030405-ab12", datetime.date(2024, 5, 6)
STARTED = datetime.date(2025, 1, 2)


def started(config: RunConfig, run_id: str = OLD) -> None:
    """Writes what an earlier start leaves, with a checkpoint."""
    (config.run_dir / "checkpoints" / "iteration-000001").mkdir(parents=True)
    (config.run_dir / "checkpoints" / "iteration-000001" / "state").write_text("x")
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    write_run_file(config.run_dir, RunFile(run_id, EMBEDDED))


def without_day(config: RunConfig) -> dict[str, Any]:
    """The configuration as a release wrote it that knew no day."""
    tree: dict[str, Any] = yaml.safe_load(config.to_yaml())
    del tree["data"]["date"], tree["data"]["tools_key"]
    return tree


def test_a_new_run_has_today_unless_it_names_a_day(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    before = datetime.date.today()
    day = dated(config, first_day(config.run_dir, None)).data.date
    assert day is not None and before <= day <= datetime.date.today()
    assert dated(dated(config, OTHER), day).data.date == OTHER


def test_a_resume_has_the_day_of_the_record(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    started(dated(config, OTHER))
    assert claim(config, resume=True) is not None and first_day(config.run_dir, OLD) == OTHER
    assert claim(dated(config, OTHER), resume=True) is not None
    with pytest.raises(ConfigError, match=r"data\.date"):
        claim(dated(config, STARTED), resume=True)


def test_a_record_of_an_older_release_has_the_day_of_its_id(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    started(config)
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(without_day(config)))
    assert claim(config, resume=True) is not None and first_day(config.run_dir, OLD) == STARTED
    assert first_day(config.run_dir, "some-other-id") == datetime.date.today()


@pytest.mark.parametrize(("resume", "fork"), [(True, False), (False, True)])
def test_a_resume_and_a_fork_start_with_the_first_day(
    resume: bool, fork: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "check_run", lambda config, only: ())  # the model does not exist
    config = run_config(tmp_path, iterations=5)
    started(config)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(without_day(config)))
    with prepared(file, [], resume, fork) as found:
        assert found.config.data.date == STARTED
    with prepared(file, ["name=another"], False, False) as found:
        assert found.config.data.date == datetime.date.today()


def test_an_export_has_the_day_of_its_run(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    started(dated(config, OTHER))
    assert day_of_export(config.run_dir / "hf" / "final") == OTHER
    assert day_of_export(config.run_dir / "checkpoints" / "final") is None and day_of_export(tmp_path / "hf" / "final") is None
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(without_day(config)))
    assert day_of_export(config.run_dir / "hf" / "final") is None
