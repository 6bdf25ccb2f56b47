"""Bare state dicts in their wrappers, and files of torch.save that hold more than weights."""

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import pickles
from polyreme_trainer.convert.command import convert
from support.models import tiny_family_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen2", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda tensors: tensors,
        lambda tensors: OrderedDict(tensors),
        lambda tensors: {"state": tensors},
        lambda tensors: {"step": 3, "state_dict": tensors, "optimizer": {"state": {0: torch.ones(3)}}},
        lambda tensors: {"model": {"policy": tensors}},
        lambda tensors: prefixed(tensors, "module."),
        lambda tensors: {"state": prefixed(tensors, "module.policy.")},
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]},
        lambda tensors: {"args": argparse.Namespace(lr=1.0), "model": {k: torch.nn.Parameter(v) for k, v in tensors.items()}},
    ],
)
def test_wrappers_are_taken_off(wrapped: Any, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    torch.save(wrapped(tensors), tmp_path / "policy.pt")
    convert(tmp_path / "policy.pt", tmp_path / "hf", config=model)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_safetensors_are_read(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file(prefixed(tensors, "module."), tmp_path / "policy.safetensors")
    convert(tmp_path / "policy.safetensors", tmp_path / "hf", config=model)
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == tensors.keys()


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda tensors: {name: t for name, t in tensors.items() if name != NORM}, f"missing: {NORM}"),
        (lambda tensors: {**tensors, "v_head.weight": torch.ones(1)}, "unexpected: v_head.weight"),
        (lambda tensors: {**tensors, NORM: torch.ones(3)}, f"shapes: {NORM} \\(3,\\) instead of \\(32,\\)"),
        (lambda tensors: {**tensors, "lm_head.weight": torch.ones(45, 32)}, "tie_word_embeddings"),
        (lambda tensors: {"weights": tensors}, "weights"),
        (lambda tensors: {"model": tensors, "policy": tensors}, "policy"),
        (lambda tensors: [1, 2], "list"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(changed: Any, named: str, model: Path, tmp_path: Path) -> None:
    torch.save(changed(load_file(model / "model.safetensors")), tmp_path / "policy.pt")
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "policy.pt", tmp_path / "hf", config=model)
    assert caught.match(named)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.pt"]


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 no archive"])
def test_a_damaged_file_is_named(content: bytes, model: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.pt").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "policy.pt", tmp_path / "hf", config=model)
    assert "policy.pt" in caught.value.expected


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_file_is_run(model: Path, tmp_path: Path) -> None:
    """This holds for files of torch.save and for the index of a torch_dist checkpoint."""
    tensors = load_file(model / "model.safetensors")
    torch.save({"args": Hostile(tmp_path / "run"), "model": tensors}, tmp_path / "policy.pt")
    convert(tmp_path / "policy.pt", tmp_path / "hf", config=model)
    (tmp_path / "index").write_bytes(pickle.dumps({"metadata": Hostile(tmp_path / "run")}))
    with (tmp_path / "index").open("rb") as stream:
        pickles.load_index(stream)
    assert not (tmp_path / "run").exists()
