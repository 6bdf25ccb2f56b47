"""The configuration of a stage: chosen by the file's key, checked as a whole, shown and read back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.describe import annotated_yaml, reference
from polyreme.config.load import load_any, load_config, load_stage, parse
from polyreme.config.section import known_keys
from polyreme.config.stage import STAGES, StageConfig
from polyreme.errors import ConfigError
from support.configs import run_config
from support.stages import stage_config


def write(folder: Path, config: Any, **changes: Any) -> Path:
    path = folder / "stage.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(config.to_yaml()) | changes))
    return path


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_read_shown_and_read_back(tmp_path: Path, stage: str) -> None:
    path = write(tmp_path, stage_config(tmp_path, stage))
    config = load_stage(path, ["trainer.steps=9"], stage)
    assert config.trainer.steps == 9 and type(config) is STAGES[stage]
    assert parse(yaml.safe_load(annotated_yaml(config)), "the text", STAGES[stage]) == config


def test_a_file_of_another_kind_names_its_command(tmp_path: Path) -> None:
    path = write(tmp_path, stage_config(tmp_path, "sft"))
    with pytest.raises(ConfigError) as caught:
        load_stage(path, [], "dpo")
    assert "polyreme sft" in caught.value.do
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "polyreme sft" in caught.value.do
    run = tmp_path / "run.yaml"
    run.write_text(run_config(tmp_path).to_yaml())
    with pytest.raises(ConfigError) as caught:
        load_stage(run, [], "sft")
    assert "stage: sft" in caught.value.do


def test_an_unknown_stage_and_an_unknown_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_any(write(tmp_path, stage_config(tmp_path, "sft"), stage="sftt"))
    assert "sftt" in caught.value.found and "reward-model" in caught.value.expected
    with pytest.raises(ConfigError) as caught:
        load_any(write(tmp_path, stage_config(tmp_path, "dpo")), ["trainer.batch_sice=3"])
    assert "trainer.batch_size" in caught.value.found


def test_paths_are_resolved_against_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, stage_config(tmp_path, "dpo"), model={"path": "m"}, data={"train": "t.jsonl"}, reference="r")
    config = load_any(path)
    assert isinstance(config, StageConfig)
    assert (config.model.path, config.data.train) == (tmp_path / "m", tmp_path / "t.jsonl")
    assert config.model_dump()["reference"] == tmp_path / "r"


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("reward-model", {"data__system": "be kind"}),
        ("dpo", {"loss": {"kind": "kto"}, "trainer__batch_size": 1}),
        ("dpo", {"loss": {"kind": "simpo"}, "reference": "/somewhere"}),
        ("dpo", {"loss": {"kind": "ipo", "label_smoothing": 0.1}}),
        ("sft", {"trainer__parallel": {"data": 2, "nodes": 2}}),
        ("sft", {"trainer__optimizer": {"lr": 1e-3, "min_lr": 1e-2}}),
        ("sft", {"rollout": {"max_new_tokens": 3}}),
    ],
    ids=["system", "kto of one row", "reference", "smoothing", "nodes", "min_lr", "rollout"],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, stage: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        stage_config(tmp_path, stage, **changes)


def test_the_fingerprint_knows_what_decides_the_weights(tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        return stage_config(tmp_path, "dpo", **changes).fingerprint()

    assert fingerprint() == fingerprint(name="other", trainer__steps=9, trainer__save_interval=1, data__eval=None)
    assert fingerprint() != fingerprint(loss={"kind": "dpo", "beta": 0.2})
    assert fingerprint() != fingerprint(trainer__batch_size=5)
    cosine = {"trainer__optimizer": {"lr": 1e-2, "schedule": "cosine"}}
    assert fingerprint(**cosine) != fingerprint(**cosine, trainer__steps=9)


def test_the_reference_has_every_key_of_every_stage() -> None:
    whole = reference()
    _, _, text = whole.partition("## Stages")
    for name, schema in STAGES.items():
        for key in known_keys(schema):
            section, _, leaf = key.rpartition(".")
            if section.partition(".")[0] != "model" and not section.startswith(("trainer.parallel", "trainer.optimizer")):
                place = section.replace("data.eval", "data.train")  # which has the same keys
                refers = f"## `{place}" in text  # to the table of the same section at another place
                assert f"| `{leaf}`" in (whole if refers else text), (name, key)
