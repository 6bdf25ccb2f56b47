"""Reads foreign files of torch.save without running code from them.

Invariant: unpickling creates only tensors, numbers, strings and containers, to which argparse's Namespace belongs. Every other
object becomes an empty placeholder, and its class is not imported.
"""

import argparse
import collections
import pickle
import zipfile
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from polyreme.errors import ConfigError

_INDEX = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)

_PLAIN: dict[tuple[str, str], object] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _INDEX},
}
"""The classes that unpickling creates: tensors, containers, and the index of a torch_dist checkpoint."""


DAMAGED = (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, TypeError, AttributeError, KeyError)
"""The exceptions that reading a damaged file raises."""


class _Empty:
    """The placeholder for an object of any other class."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...

    def __setitem__(self, *_: object) -> None: ...

    def append(self, _: object) -> None: ...

    def extend(self, _: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if found := _PLAIN.get((module, name)):
            return found
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        return _Empty


_PICKLE: object = SimpleNamespace(Unpickler=_Unpickler, load=lambda file, **_: _Unpickler(file).load(), __name__="pickle")
"""The attributes that torch.load requires of a pickle module."""


def load(file: Path) -> Any:
    """The content of a torch.save file. Tensors stay in the file until they are read. Raises ConfigError for a damaged file."""
    try:
        if zipfile.is_zipfile(file):
            _check_archive(file)
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLE)
    except DAMAGED as error:
        raise ConfigError(f"a file of torch.save in {file}", f"{type(error).__name__}: {error}", "Restore the file.") from None


def _check_archive(file: Path) -> None:
    """Raises ValueError for a TorchScript archive, because torch.load runs the program in it whatever the pickle module is, and
    for compressed entries, which torch.save never writes: a small one can fill the memory."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(PurePosixPath(entry.filename).name == "constants.pkl" for entry in entries):
        raise ValueError("a TorchScript program")
    if packed := [
        entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > entry.compress_size
    ]:
        raise ValueError(f"{packed[0].filename} is compressed, {packed[0].compress_size} bytes for {packed[0].file_size}")


def load_index(stream: BinaryIO) -> Any:
    """The index of a torch_dist checkpoint. Raises one of DAMAGED for a damaged one."""
    return _Unpickler(stream).load()
