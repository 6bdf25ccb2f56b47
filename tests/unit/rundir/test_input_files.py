"""The input files of a run are checked before anything starts."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.rundir.input_files import input_errors, read_model_files
from support.configs import run_config


def weights(tensors: dict[str, int]) -> bytes:
    """A safetensors file with uint8 tensors of the given sizes."""
    ends = list(itertools.accumulate(tensors.values()))
    header = {
        name: {"dtype": "U8", "shape": [n], "data_offsets": [end - n, end]}
        for (name, n), end in zip(tensors.items(), ends, strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(sum(tensors.values()))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Configuration of a run whose model directory is complete and whose data set is missing."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(weights({}))
    return run_config(tmp_path)


def test_the_files_of_the_configuration_must_exist(config: RunConfig, tmp_path: Path) -> None:
    [error] = input_errors(config)
    assert "data.train" in error.expected
    (tmp_path / "train.jsonl").touch()
    assert not list(input_errors(config))
    (tmp_path / "model" / "model.safetensors").unlink()
    [error] = input_errors(config)
    assert "weights" in error.expected
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        read_model_files(config.model.path)
    with pytest.raises(ConfigError, match="no such directory"):
        read_model_files(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda whole: whole[:-1], "does not match its header"),
        (lambda whole: whole[:20], "does not match its header"),
        (lambda whole: whole[:3], "does not match its header"),
        (lambda whole: whole + b"x", "does not match its header"),
        (lambda whole: whole.replace(b"data_offsets", b"date_offsets"), "no safetensors header"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1", "does not match its header"),
    ],
)
def test_damaged_weights_are_an_error(config: RunConfig, tmp_path: Path, damage: Callable[[bytes], bytes], found: str) -> None:
    (tmp_path / "train.jsonl").touch()
    whole = weights({"a": 100, "b": 0, "c": 28})
    path = tmp_path / "model" / "model-00001-of-00002.safetensors"
    path.write_bytes(whole)
    assert not list(input_errors(config))
    path.write_bytes(damage(whole))
    [refused] = input_errors(config)
    assert isinstance(refused, ConfigError) and path.name in refused.expected and found in refused.found


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_a_scaled_context_ends_at_max_position_embeddings_too(config: RunConfig, tmp_path: Path, scaling: str) -> None:
    """The learner takes no longer sequence, whatever the engine would sample."""
    (tmp_path / "train.jsonl").touch()
    sizes = {"max_position_embeddings": 48, scaling: {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    [error] = input_errors(config)
    assert "rollout.max_model_len" in error.expected and "48" in error.expected
