"""Weight files that are missing, damaged or of another model are a ConfigError that names the directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.hf_files import open_tensors, save_tensors

SHAPES = {"a": (2, 3), "b": (4,)}
ALIASES = {"c": "a"}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


def save(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = {name: tensor.clone() for name, tensor in (TENSORS | changes).items() if tensor is not None}
    save_file(tensors, path / "model.safetensors")


def check(path: Path) -> None:
    with open_tensors(path) as tensors:
        tensors.check(SHAPES, ALIASES)
        assert torch.equal(tensors["a"], TENSORS["a"])


def test_good_files_are_read_from_one_file_or_several(tmp_path: Path) -> None:
    save(tmp_path)
    check(tmp_path)
    save(tmp_path, c=TENSORS["a"])  # an alias may also be stored
    check(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"a": None}, {"b": torch.ones(5)}, {"b": torch.ones(4, dtype=torch.int8)}, {"c": torch.zeros(2, 3)}],
    ids=["missing", "shape", "quantized", "alias"],
)
def test_weights_of_another_model_are_refused(changes: dict[str, torch.Tensor | None], tmp_path: Path) -> None:
    save(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        check(tmp_path)
    assert next(iter(changes)) in caught.value.expected
    assert str(tmp_path) in f"{caught.value.expected} {caught.value.found}"


def test_a_bias_in_the_choice_of_experts_is_not_ignored(tmp_path: Path) -> None:
    save(tmp_path, **{"model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(4)})
    with pytest.raises(ConfigError) as caught:
        check(tmp_path)
    assert "model.layers.0.mlp.gate.e_score_correction_bias" in caught.value.found


def test_the_biases_of_the_model_and_of_layers_that_no_model_reads_are_no_error(tmp_path: Path) -> None:
    first, second, third = (f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1, 2))
    save(tmp_path, **dict.fromkeys((first, second, third), torch.ones(4)))
    with open_tensors(tmp_path) as opened:
        opened.check({first: (4,), second: (4,)}, {}, ("model.layers.2.",))
        for shapes, unread, named in (({first: (4,)}, ("model.layers.2.",), second), ({first: (4,), second: (4,)}, (), third)):
            with pytest.raises(ConfigError) as caught:
                opened.check(shapes, {}, unread)
            assert named in caught.value.found


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _index(content: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(content)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda path: (path / "model.safetensors").write_bytes(b""),
        lambda path: (path / "model.safetensors").unlink(),
        _index("{"),
        _index("{}"),
        _index("[]"),
        _index('{"weight_map": 3}'),
        _index('{"weight_map": {"a": 3}}'),
        _index('{"weight_map": {"a": "absent.safetensors"}}'),
    ],
)
def test_damaged_files_are_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(tmp_path)
    assert str(tmp_path) in caught.value.expected


def test_a_file_that_cannot_be_written_is_an_error_of_the_system_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "model.safetensors"
    with pytest.raises(FileNotFoundError) as error:
        save_tensors({"weight": torch.zeros(4)}, file)
    assert error.value.filename == str(file)


def test_others_may_read_a_file_where_the_umask_allows_it(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_tensors({"weight": torch.zeros(4)}, tmp_path / "weights")
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "plain").stat().st_mode
