"""A directory without a run is an error that names the runs that exist, in every command; a resume starts no new run."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli.main import build_app
from polyreme.config.stage import STAGES
from polyreme.errors import ConfigError
from polyreme.rundir.run_directory import NO_REDIS, RunFile, no_run, write_run_file
from polyreme.rundir.start import prepared
from support.stages import prepared as prepared_stage
from support.stages import stage_config, write_data, write_model


def runs(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        write_run_file(folder / name, RunFile(f"{name}-1", NO_REDIS))
    return folder


def test_the_most_similar_run_is_named_first(tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", "letters", "sums", "words")
    error = no_run(folder / "leters")
    assert error.found == f"no such directory; the runs in {folder} are letters, sums, words"
    assert f"Did you mean {folder / 'letters'}?" in error.do
    assert "no run.json in it; the runs in" in no_run(folder).found, "the folder of runs itself"
    (folder / "notes").touch()
    assert no_run(folder / "notes").found.startswith("a file")
    assert no_run(tmp_path / "none" / "such").found == "no such directory"
    assert no_run(runs(tmp_path / "many", *(f"run-{number}" for number in range(20))) / "x").found.endswith(", ...")


@pytest.mark.parametrize("words", [["audit"], ["compare", "."], ["samples"], ["logs"], ["status"], ["report"], ["chat"]])
def test_every_command_names_the_runs_beside_a_misspelt_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs(tmp_path / "runs", "letters"))
    [command, *others] = words
    error = CliRunner().invoke(build_app([command]), [command, "leters", *others]).exception
    assert isinstance(error, ConfigError) and "no such directory" in error.found and "letters" in f"{error.found} {error.do}"


def test_a_report_of_a_misspelt_run_is_an_error(tmp_path: Path) -> None:
    run, report = runs(tmp_path / "runs", "letters") / "leters", tmp_path / "report.txt"
    result = CliRunner().invoke(build_app(["doctor"]), ["doctor", "--run", str(run), "--report", str(report)])
    assert isinstance(result.exception, ConfigError) and "letters" in result.exception.found
    assert not report.exists() and not result.stdout


@pytest.mark.parametrize("fork", [False, True])
def test_a_resume_or_fork_of_a_misspelt_name_starts_nothing(config_file: Path, fork: bool) -> None:
    folder = runs(config_file.parent / "runs", "letters")
    overrides = [f"output_dir={folder}", "name=leters"]
    with pytest.raises(ConfigError) as error, prepared(config_file, overrides, resume=not fork, fork=fork):
        raise AssertionError("it would start")
    assert "letters" in error.value.found
    assert sorted(path.name for path in folder.iterdir()) == ["letters"], "no directory is left"


def test_a_service_that_always_resumes_starts_the_first_run_unless_a_name_is_given(config_file: Path) -> None:
    """Containers start the trainer with --resume, also for the first time."""
    with prepared(config_file, [], resume=True, fork=False, only="trainer") as start:
        assert start.existing is None
    with pytest.raises(ConfigError), prepared(config_file, ["name=leters"], resume=True, fork=False, only="trainer"):
        pass


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_resume_of_a_stage_that_does_not_exist_is_an_error(stage: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    config = stage_config(tmp_path, stage)
    prepared_stage(config)
    file = tmp_path / "stage.yaml"
    shutil.copyfile(config.run_dir / "config.yaml", file)
    error = CliRunner().invoke(build_app([stage]), [stage, str(file), "name=other", "--resume"]).exception
    assert isinstance(error, ConfigError) and stage in error.found
    assert not (config.output_dir / "other").exists()


def test_a_run_directory_in_place_of_a_file_or_an_override_is_explained(config_file: Path, tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", "letters") / "letters"
    with pytest.raises(ConfigError, match="name=NAME"), prepared(config_file, [str(folder)], resume=True, fork=False):
        pass
    (folder / "config.yaml").touch()
    with pytest.raises(ConfigError) as error, prepared(folder, [], resume=True, fork=False):
        pass
    assert str(folder / "config.yaml") in error.value.do
