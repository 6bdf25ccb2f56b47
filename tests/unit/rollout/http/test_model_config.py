"""The configuration with which a model directory is served without a run."""

import datetime
import json
from pathlib import Path

import pytest

from polyreme.config.stage import STAGES
from polyreme.errors import ConfigError
from polyreme.rundir.start_day import dated
from polyreme_rollout.http.model_config import config_for_model
from support.configs import run_config
from support.stages import prepared, stage_config, write_data, write_model
from support.tiny_tokenizer import model_files


def export(run_dir: Path) -> Path:
    folder = run_dir / "hf" / "final"
    folder.mkdir(parents=True)
    for name, content in model_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("stage", list(STAGES))
def test_the_export_of_a_stage_is_served_on_its_device_in_its_dtype(tmp_path: Path, stage: str) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    config = stage_config(tmp_path, stage, device="cuda", model__dtype="bfloat16")
    folder = export(prepared(config))
    served = config_for_model(folder)
    assert (served.device, served.model.dtype, served.model.path) == ("cuda", "bfloat16", folder)
    context = json.loads(model_files()["config.json"])["max_position_embeddings"]
    assert served.rollout.max_model_len == context


def test_the_export_of_a_run_has_the_runs_settings(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    folder = export(config.run_dir)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    served = config_for_model(folder)
    assert served.model.path == folder and served.rollout == config.rollout


def test_a_reward_model_is_not_served(tmp_path: Path) -> None:
    folder = export(tmp_path / "runs" / "x")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="reward model"):
        config_for_model(folder)


def test_an_export_is_served_with_the_day_of_its_run_or_stage(tmp_path: Path) -> None:
    day = datetime.date(2025, 1, 2)
    for config in (dated(run_config(tmp_path / "run"), day), dated(stage_config(tmp_path / "stage", "sft"), day)):
        folder = export(config.run_dir)
        (config.run_dir / "config.yaml").write_text(config.to_yaml())
        assert config_for_model(folder).data.date == day
    assert config_for_model(export(tmp_path / "other")).data.date is None
