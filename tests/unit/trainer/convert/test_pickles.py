"""A file of torch.save is data: reading it calls nothing that the file names."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme.errors import ConfigError
from polyreme_trainer.convert import pickles


class Call:
    """Pickled as a call of `function`, as an attacker would write it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


class Echo(torch.nn.Module):
    """A program that TorchScript can compile."""

    def forward(self, number: int) -> int:
        return number


def test_tensors_and_containers_are_read(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.arange(6).view(2, 3)}, "names": ["weight"], "step": 3}, tmp_path / "model.pt")
    content = pickles.load(tmp_path / "model.pt")
    assert content["names"] == ["weight"] and content["step"] == 3
    assert content["model"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_call_in_a_file_is_not_made(tmp_path: Path) -> None:
    called = tmp_path / "called"
    torch.save({"args": Call(Path.touch, called), "step": 3}, tmp_path / "model.pt", pickle_protocol=4)
    assert pickles.load(tmp_path / "model.pt")["step"] == 3
    with (tmp_path / "index").open("w+b") as file:
        pickle.dump(Call(Path.touch, called), file, protocol=4)
        file.seek(0)
        pickles.load_index(file)
    assert not called.exists()


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # such files still exist
def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    torch.jit.script(Echo()).save(str(tmp_path / "model.pt"))
    with pytest.raises(ConfigError) as caught:
        pickles.load(tmp_path / "model.pt")
    assert "TorchScript" in caught.value.found


def test_a_compressed_entry_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert (tmp_path / "model.pt").stat().st_size < (tmp_path / "plain.pt").stat().st_size / 100
    with pytest.raises(ConfigError, match=r"is compressed, \d+ bytes for") as caught:
        pickles.load(tmp_path / "model.pt")
    assert str(tmp_path / "model.pt") in caught.value.expected
