"""Reading the weights of a Hugging Face directory: one safetensors file, or several with an index. Nothing else is ever unpickled."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from polyreme.errors import ConfigError


class HfTensors(Mapping[str, Tensor]):
    """Tensors by name, read from memory-mapped files when asked for."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def open_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[HfTensors]:
    """Opens the directory's weights, checked to hold every tensor of `shapes`. Raises ConfigError."""
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in _weight_files(Path(path)):
            handle = stack.enter_context(safe_open(file, framework="pt"))
            files |= dict.fromkeys(handle.keys(), handle)
        for name, shape in shapes.items():
            if name not in files:
                raise ConfigError(
                    f"a tensor {name} in {path}", f"{len(files)} others", "Use weights that belong to the config.json."
                )
            found = tuple(files[name].get_slice(name).get_shape())
            if found != shape:
                raise ConfigError(f"{name} of shape {shape}", f"{found} in {path}", "Use weights that belong to the config.json.")
        yield HfTensors(files)


def _weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"model.safetensors or {index.name} in {path}", "neither", "Save the model with transformers' save_pretrained."
        )
    files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"the files that {index} names", f"{missing} are missing", "Complete the model directory.")
    return files
