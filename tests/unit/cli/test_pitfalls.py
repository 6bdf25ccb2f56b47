"""Pitfalls of docs/guarantees.md that no other test covers."""

from pathlib import Path

import yaml

from polyreme.rundir.input_files import input_errors
from support.configs import run_config

ROOT = Path(__file__).resolve().parents[3]


def test_weights_of_another_format_are_an_error_that_says_how_to_convert(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.model.path.mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (config.model.path / name).write_text("{}")
    (tmp_path / "train.jsonl").touch()
    [error] = input_errors(config)
    assert "safetensors" in error.expected
    assert "save_pretrained" in error.do


def test_what_a_container_writes_outlives_it() -> None:
    """The run directory and the store are volumes, and nothing removes a container's volumes with it."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = {name: service.get("volumes", []) for name, service in compose["services"].items()}
    assert any(mount.endswith(":/runs") for mount in mounts["trainer"])
    assert "redis:/data" in mounts["redis"]
    assert {"runs", "redis"} <= compose["volumes"].keys()
