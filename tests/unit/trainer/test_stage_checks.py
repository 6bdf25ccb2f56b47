"""Errors of a stage are found before a process starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.stage import STAGES, StageConfig
from polyreme.errors import AbsentError, ConfigError, DataError
from polyreme.rundir.checks import check_run, findings
from support.stages import stage_config, write_data
from support.tiny_tokenizer import model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data, and a model directory whose weights are empty."""
    write_data(tmp_path)
    (tmp_path / "model").mkdir()
    for name, content in model_files().items():
        (tmp_path / "model" / name).write_bytes(content)
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


@pytest.mark.parametrize("stage", STAGES)
def test_a_good_stage_passes(folder: Path, stage: str) -> None:
    assert check_run(stage_config(folder, stage)) == ()


def test_rows_that_are_left_out_are_a_notice(folder: Path) -> None:
    config = stage_config(folder, "reward-model", data__tie_key="tie", data__eval=None)
    (notice,) = check_run(config)
    assert "ties" in notice and "3 of 22" in notice


@pytest.mark.parametrize(
    ("stage", "changes", "kind"),
    [
        ("sft", {"data__response_key": "answer"}, DataError),
        ("sft", {"data__max_tokens": 500}, ConfigError),
        ("reward-model", {"data__margin_key": "prompt"}, DataError),
        ("dpo", {"data__chosen_key": "good"}, DataError),
        ("dpo", {"loss": {"kind": "kto"}, "data__label_key": "margin"}, DataError),
        ("dpo", {"reference": "/nowhere"}, AbsentError),
    ],
    ids=["column", "context", "margin", "chosen", "label", "reference"],
)
def test_what_is_wrong_is_an_error(folder: Path, stage: str, changes: dict[str, Any], kind: type[Exception]) -> None:
    found = findings(stage_config(folder, stage, **changes))
    assert any(type(error) is kind for error in found.errors), found


def test_a_tokenizer_larger_than_the_model_is_an_error(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 20}))
    assert any(isinstance(error, ConfigError) for error in findings(stage_config(folder, "sft")).errors)


def test_missing_data_is_an_error(folder: Path) -> None:
    (folder / "held_out.jsonl").unlink()
    assert [type(error) for error in findings(stage_config(folder, "sft")).errors] == [AbsentError]


@pytest.fixture
def compared(folder: Path) -> StageConfig:
    """Preferences with a reference in a directory of its own, a copy of the model."""
    shutil.copytree(folder / "model", folder / "reference")
    config = stage_config(folder, "dpo", reference=str(folder / "reference"))
    assert not findings(config).errors
    return config


@pytest.mark.parametrize("field", ["vocab_size", "max_position_embeddings"])
def test_a_reference_reads_every_token_and_position_of_the_model(folder: Path, compared: StageConfig, field: str) -> None:
    path = folder / "reference" / "config.json"
    sizes = json.loads(path.read_text())
    path.write_text(json.dumps(sizes | {field: min(sizes[field], compared.data.max_tokens) - 1}))
    (error,) = findings(compared).errors
    assert str(path.parent) in str(error) and field in str(error)


def test_a_reference_with_another_tokenizer_is_an_error(folder: Path, compared: StageConfig) -> None:
    """Of the same size, it would judge other texts without a word."""
    path = folder / "reference" / "tokenizer.json"
    tokens = json.loads(path.read_text())
    words = tokens["model"]["vocab"]
    (first, one), (second, two) = sorted(words.items())[-2:]
    path.write_text(json.dumps(tokens | {"model": tokens["model"] | {"vocab": words | {first: two, second: one}}}))
    (error,) = findings(compared).errors
    assert str(path) in str(error) and "2 other tokens" in str(error)


@pytest.mark.parametrize(("text", "errors"), [("<other>", 1), (None, 0)])
def test_a_reference_with_other_added_tokens_is_an_error(
    folder: Path, compared: StageConfig, text: str | None, errors: int
) -> None:
    """One that lacks an added token of the model has at least a row of its embeddings for it."""
    path = folder / "reference" / "tokenizer.json"
    tokens = json.loads(path.read_text())
    added, vocab = tokens["added_tokens"], tokens["model"]["vocab"]
    del vocab[max(vocab, key=vocab.__getitem__)]  # which has the last id
    for file, content in ((folder / "model" / "tokenizer.json", "<tool>"), (path, text)):
        last = [] if content is None else [added[-1] | {"id": len(vocab), "content": content}]
        file.write_text(json.dumps(tokens | {"added_tokens": [*added, *last]}))
    assert [str(path) in str(error) for error in findings(compared).errors] == [True] * errors
