"""Reads and writes the weights of a Hugging Face directory: one safetensors file, or several with an index. It unpickles nothing.

Invariant: a missing or damaged file raises ConfigError that names it, never a parser error. An unwritable file raises OSError.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polyreme.errors import ConfigError

_RESTORE = "Restore the model directory from its source."
_FLOATS = ("F64", "F32", "F16", "BF16")

EXPERT_BIASES = ("e_score_correction_bias", "expert_bias", "moe_statics.e_score_correction_bias")
"""The ends of the names of a bias in the choice of experts (Wang et al. 2024)."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each of which `read` returns when it is accessed."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._access = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._access(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class HfTensors(LazyTensors):
    """Tensors by name, read from memory-mapped files when accessed."""

    def __init__(self, path: Path, files: Mapping[str, safe_open]) -> None:
        super().__init__(files, lambda name: files[name].get_tensor(name))
        self._path, self._files = path, files

    def check(self, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], unread: tuple[str, ...] = ()) -> None:
        """Raises ConfigError unless each tensor of `shapes` exists in its shape, and each stored alias equals its tensor. Another
        bias for choosing experts is refused: without it, others would be chosen. `unread`: starts of names that no model reads.
        """
        for name in self._files:
            if name.endswith(EXPERT_BIASES) and name not in shapes and not name.startswith(unread):
                raise ConfigError(
                    f"experts that only the router chooses, in {self._path}",
                    f"{name}, which balances them without a loss",
                    "Choose a model without this bias: the learner's model of this model_type has none.",
                )
        for name, shape in shapes.items():
            if name not in self._files:
                raise ConfigError(
                    f"a tensor {name} in {self._path}",
                    f"{len(self._files)} others",
                    "Use weights that belong to the config.json.",
                )
            header = self._files[name].get_slice(name)
            found, dtype = tuple(header.get_shape()), header.get_dtype()
            if found != shape:
                raise ConfigError(
                    f"{name} of shape {shape}", f"{found} in {self._path}", "Use weights that belong to the config.json."
                )
            if dtype not in _FLOATS:
                raise ConfigError(
                    f"{name} of a type in {', '.join(_FLOATS)}", f"{dtype} in {self._path}", "Use unquantized weights."
                )
        for alias, name in aliases.items():
            if alias in self._files and not torch.equal(self[alias], self[name]):
                raise ConfigError(
                    f"{alias} equal to {name} in {self._path}, because its config.json has tie_word_embeddings: true",
                    "different numbers",
                    "Set tie_word_embeddings: false in this config.json, or remove the unused tensor.",
                )


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a safetensors file. Raises OSError, such as that of a full disk."""
    file.touch()
    mode = file.stat().st_mode  # safetensors lets only the owner read, but other users' services load exports
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from None


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[HfTensors]:
    """Opens the directory's weights. Raises ConfigError when a file is missing or damaged."""
    with contextlib.ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for file in _weight_files(Path(path)):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"a safetensors file {file}", str(error), _RESTORE) from None
            files |= dict.fromkeys(handle.keys(), handle)
        yield HfTensors(path, files)


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"model.safetensors or {index.name} in {path}", "neither", "Save the model with transformers' save_pretrained."
        )
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = [path / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a weight_map of tensors to files in {index}", repr(error), _RESTORE) from None
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"the files that {index} names", f"{missing} are missing", "Complete the model directory.")
    return files
