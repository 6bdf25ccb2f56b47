"""What several files of tests of the command line have in common."""

from pathlib import Path

import pytest

from support.configs import run_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration whose files exist and hold nothing."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "train.jsonl").touch()
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    return path
