"""Reads a Megatron checkpoint in the format `torch_dist`: *.distcp files and .metadata with the positions of the tensors' pieces.

Such a checkpoint has whole parameters, as on one rank, with all layers (and experts) stacked; if only some layers have experts,
each layer has its own. Except for the padding of the vocabulary, it does not depend on the layout of the run that wrote it.

Invariant: a tensor is returned only if the pieces cover all of its numbers.
"""

import io
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import pickles
from polyreme_trainer.convert.names import CRITIC_BIAS, OUTPUT_LAYER, check_shapes, local_name
from polyreme_trainer.convert.parameters import file_shapes, file_slices
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import EMBEDDING_ROW, Architecture
from polyreme_trainer.megatron.huggingface.hf_files import LazyTensors
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank

INDEX = ".metadata"
_STACKED = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"^(optimizer\.|rng_state|rerun_state)|(_extra_state\d*(/|$)|rotary_pos_emb\.inv_freq$)")


class _Stored(Protocol):
    """Where the bytes of a piece of a tensor are."""

    relative_path: str
    offset: int
    length: int


_Chunk = tuple[tuple[int, ...], tuple[int, ...], _Stored]
"""Place, shape and bytes of a piece."""


class TorchDist(LazyTensors):
    """The Hugging Face tensors of a checkpoint, assembled when they are read. Raises ConfigError when they do not fit."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self._folder, self._index = folder, _load_index(folder)
        self._chunks = _chunks(self._index)
        self._shapes = hf_mapping.hf_shapes(arch)
        super().__init__(self._shapes, self._assembled)
        self._keys = {_named(key): key for key in self._index.state_dict_metadata if not _NO_WEIGHTS.search(key)}
        sizes = {name: tuple(self._index.state_dict_metadata[key].size) for name, key in self._keys.items()}
        rank = Rank(vocab_multiple=sizes.get(EMBEDDING_ROW.param, (hf_mapping.VOCAB_MULTIPLE,))[0])
        places = self._check(arch, rank, sizes)
        if CRITIC_BIAS in places and self._read(self._keys[CRITIC_BIAS], ()).any():
            raise ConfigError(f"{CRITIC_BIAS} of zero in {folder}", "another number", "Convert a critic whose head has no bias.")
        self._pieces: dict[str, list[tuple[str, tuple[int, ...], hf_mapping.Slice]]] = {name: [] for name in self._shapes}
        for piece in file_slices(arch, rank):
            key, place = places[piece.param]
            self._pieces[piece.hf_name].append((key, place, piece))

    def _check(self, arch: Architecture, rank: Rank, sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """For each parameter, the name of the stored tensor that contains it, and its position in the stack."""
        places: dict[str, tuple[str, tuple[int, ...]]] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for param, shape in file_shapes(arch, rank).items():
            if param == CRITIC_BIAS and param not in sizes:
                continue
            key, place, counts = (param, (), ()) if param in sizes else stacked(param, arch)
            places[param], expected[key] = (key, place), (*counts, *shape)
        if arch.head == "value":
            sizes.pop(OUTPUT_LAYER, None)
        check_shapes(expected, sizes, str(self._folder))
        return places

    def _assembled(self, name: str) -> Tensor:
        whole: Tensor | None = None
        for key, place, piece in self._pieces[name]:
            value = self._read(self._keys[key], place)[piece.param_index]
            if whole is None:
                whole = torch.empty(self._shapes[name], dtype=value.dtype)
            whole[piece.hf_index] = value
        assert whole is not None
        return whole

    def _read(self, key: str, place: tuple[int, ...]) -> Tensor:
        """One parameter of a stacked tensor, or the whole tensor when `place` is empty."""
        tensor = self._index.state_dict_metadata[key]
        shape = tuple(tensor.size)[len(place) :]
        whole = torch.empty(shape, dtype=tensor.properties.dtype)
        covered = 0
        for starts, sizes, stored in self._chunks.get(key, ()):
            inside = tuple(at - start for at, start in zip(place, starts, strict=False))
            if not all(0 <= at < size for at, size in zip(inside, sizes, strict=False)):
                continue  # another layer's
            part = self._chunk(stored, key)[inside]
            offsets = starts[len(place) :]
            whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
            covered += part.numel()
        if covered != whole.numel():
            raise ConfigError(f"{whole.numel()} numbers of {key} in {self._folder}", str(covered), "Restore the checkpoint.")
        return whole

    def _chunk(self, stored: _Stored, key: str) -> Tensor:
        file = self._folder / stored.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(stored.offset)
                tensor = torch.load(io.BytesIO(stream.read(stored.length)), map_location="cpu", weights_only=True)
        except pickles.DAMAGED as error:
            raise ConfigError(f"a piece of {key} in {file}", f"{type(error).__name__}: {error}", "Restore the file.") from None
        assert isinstance(tensor, Tensor)
        return tensor


def stacked(param: str, arch: Architecture) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """For a layer's parameter, the name of the tensor of all layers (and experts), its place there, and the number of each.

    For another parameter, its own name, and no numbers. Layers of different kinds are not stacked.
    """
    key, place, counts = param, tuple[int, ...](), tuple[int, ...]()
    layer = _STACKED.match(param)
    if layer is not None and not arch.dense_layers:
        key, place, counts = _STACKED.sub("decoder.layers.", param), (int(layer[1]),), (arch.layers,)
    if number := _EXPERT.search(key):
        key, place, counts = _EXPERT.sub("mlp.experts.experts.", key), (*place, int(number[1])), (*counts, arch.experts)
    return key, place, counts


def _named(key: str) -> str:
    """The key of a tensor with megatron-core's local names."""
    return local_name(key.removeprefix("model."))


def _chunks(index: Any) -> dict[str, list[_Chunk]]:
    """For every tensor, the places of its pieces, their shapes, and where they are stored."""
    chunks: dict[str, list[_Chunk]] = {}
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, tensor in index.state_dict_metadata.items()
        for chunk in getattr(tensor, "chunks", ())
    }
    for entry, stored in index.storage_data.items():
        tensor = index.state_dict_metadata.get(entry.fqn)
        starts = tuple(entry.offset or (0,) * len(getattr(tensor, "size", ())))
        if (entry.fqn, starts) in sizes:
            chunks.setdefault(entry.fqn, []).append((starts, sizes[entry.fqn, starts], stored))
    return chunks


def _load_index(folder: Path) -> Any:
    file = folder / INDEX
    try:
        with file.open("rb") as stream:
            index = pickles.load_index(stream)
        if not index.state_dict_metadata or not index.storage_data:
            raise ValueError("no tensors")
    except pickles.DAMAGED as error:
        raise ConfigError(
            f"the index of a torch_dist checkpoint in {file}", f"{type(error).__name__}: {error}", "Restore it."
        ) from None
    return index
