"""A model directory is served with the settings of the run, or the day of the stage, that exported it."""

import datetime
from pathlib import Path

from polyreme.cli.start_day import dated
from polyreme.config.base import BaseConfig
from polyreme_rollout.model_config import config_for_model
from support.configs import run_config
from support.stages import stage_config
from support.tiny_tokenizer import model_files

DAY = datetime.date(2025, 1, 2)


def export_of(config: BaseConfig) -> Path:
    folder = config.run_dir / "hf" / "final"
    folder.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    return folder


def write_model(folder: Path) -> Path:
    for name, content in model_files().items():
        (folder / name).write_bytes(content)
    return folder


def test_an_export_of_a_run_has_its_settings(tmp_path: Path) -> None:
    run = dated(run_config(tmp_path), DAY)
    folder = write_model(export_of(run))
    found = config_for_model(folder)
    assert (found.model.path, found.data, found.rollout) == (folder, run.data, run.rollout)


def test_an_export_of_a_stage_has_its_day(tmp_path: Path) -> None:
    folder = write_model(export_of(dated(stage_config(tmp_path, "sft"), DAY)))
    assert config_for_model(folder).data.date == DAY and config_for_model(folder).model.path == folder
    (tmp_path / "model").mkdir()
    assert config_for_model(write_model(tmp_path / "model")).data.date is None
