"""One role's state in files, also between optimizer steps: what each rank saves of it, for ranks of the same or another layout.

    layout.json             the numbers of ranks that saved
    state-R.safetensors     KIND/START/PARAMETER -> the elements of the flat parameter from START on that rank R saves

Invariant: numbers are copied, never computed: ranks of the same layout get back the bits that they saved.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_files import save_tensors
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.parallel.reshard import RankMesh, Read, reader

Parts = Mapping[str, Mapping[str, tuple[int, Tensor]]]
"""Kind of state -> parameter -> first element and flat tensor, as in `RankState`."""
_LAYOUT = "layout.json"


def write_parts(folder: Path, number: int, parts: Parts, layout: RankMesh) -> None:
    """Writes what rank `number` saves. Raises OSError."""
    if number == 0:
        (folder / _LAYOUT).write_text(json.dumps(asdict(layout)))
    tensors = {
        f"{kind}/{start}/{name}": flat.detach().to("cpu", copy=True)
        for kind, each in parts.items()
        for name, (start, flat) in each.items()
    }
    save_tensors(tensors, _file(folder, number))


def read_parts(folder: Path, arch: Architecture, here: Rank) -> tuple[Read, frozenset[str]]:
    """What reads a directory for the rank `here`, and the kinds of state in it. `arch`: the table of trained parameters."""
    layout = RankMesh(**json.loads((folder / _LAYOUT).read_text()))
    sources = layout.files(here)
    numbers = sorted({number for source in sources for number in (*source.numbers, *source.expert_numbers)})
    found = {number: _read(_file(folder, number)) for number in numbers}
    kinds = frozenset(kind for state in found.values() for kind in state)
    states = {number: {kind: state.get(kind, {}) for kind in kinds} for number, state in found.items()}
    return reader(arch, here, sources, states), kinds


def whole(part: tuple[int, Tensor] | None, shape: torch.Size) -> Tensor:
    """A parameter of which a rank has a part; its other elements are 0."""
    if part is None:
        return torch.zeros(shape)
    start, flat = part
    if flat.numel() == shape.numel():
        return flat.view(shape)
    result = flat.new_zeros(shape)
    result.view(-1)[start : start + flat.numel()] = flat
    return result


def _read(file: Path) -> dict[str, dict[str, tuple[int, Tensor]]]:
    state: dict[str, dict[str, tuple[int, Tensor]]] = {}
    for key, tensor in load_file(file).items():
        kind, start, name = key.split("/", 2)
        state.setdefault(kind, {})[name] = int(start), tensor
    return state


def _file(folder: Path, number: int) -> Path:
    return folder / f"state-{number}.safetensors"
