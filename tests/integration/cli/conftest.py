"""What several files of tests of the command line have in common."""

from pathlib import Path

import pytest

from support.configs import run_config
from support.tiny_tokenizer import model_files


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration that passes every check: a model directory whose weights are empty, and one row of data."""
    (tmp_path / "model").mkdir()
    for name, content in model_files().items():
        (tmp_path / "model" / name).write_bytes(content)
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    return path
