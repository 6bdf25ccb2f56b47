"""Writes a Megatron checkpoint in the format `torch_dist`, as `megatron.core.dist_checkpointing` saves one of a single rank.

torch writes the files. Every layer (and expert) is a separate piece in a tensor of all layers, so a rank that loads the
checkpoint reads the pieces of its own layers only, in any layout.

Invariant: one parameter at a time is in memory.
"""

import io
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from polyreme.errors import ConfigError
from polyreme.terminal.progress_bar import bar
from polyreme_trainer.convert.layout import ITERATION, TRACKER, arguments
from polyreme_trainer.convert.names import engine_name, experts_engine_name
from polyreme_trainer.convert.parameters import assembled, file_shapes, file_slices
from polyreme_trainer.convert.torch_dist import stacked
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, Slice

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
"""metadata.json: the format, and its version, by which megatron-core chooses how to load."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LINEAR = re.compile(r"^decoder\.layers\..*linear_(qkv|proj|fc1|fc2)\.weight$")
"""The weights of parallel linear layers. Each has an additional extra state, which is None for megatron-core's local layers."""


def write(target: Path, arch: Architecture, tensors: Mapping[str, Tensor], vocab_multiple: int, *, engine: bool) -> None:
    """Fills an empty directory with the checkpoint of a model.

    Args:
        vocab_multiple: rows of zeros pad the embedding to a multiple of this.
        engine: name parameters of a model with experts as Transformer Engine's layers do. Without experts both have these names.

    Raises:
        ConfigError: a parameter has another dtype in one layer than in the others, or its tensors have different dtypes.
    """
    rank = Rank(vocab_multiple=vocab_multiple)
    folder = target / f"iter_{ITERATION:07d}"
    writer, planner = FileSystemWriter(folder), _Parameters(arch, tensors, rank)
    items = planner.items(partial(_name, arch) if engine else engine_name)
    (plan,), metadata = create_default_global_save_plan([SavePlan(items)])
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    with bar("converting", len(items)) as planner.count:
        written = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [written])
    common = {"args": arguments(arch, rank), "checkpoint_version": 3.0, "iteration": ITERATION}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CONFIG))
    (target / TRACKER).write_text(str(ITERATION))


def _name(arch: Architecture, param: str) -> str:
    """Transformer Engine's name for a parameter. Only layers without experts join the MLP's norm and first matrix in a layer."""
    layer = _LAYER.match(param)
    return experts_engine_name(param) if layer is not None and arch.has_experts(int(layer[1])) else engine_name(param)


class _Parameters(DefaultSavePlanner):
    """Assembles each parameter from Hugging Face tensors when it is written."""

    def __init__(self, arch: Architecture, tensors: Mapping[str, Tensor], rank: Rank) -> None:
        super().__init__()
        self._arch, self._tensors = arch, tensors
        self._shapes = file_shapes(arch, rank)
        self._slices: dict[str, list[Slice]] = {param: [] for param in self._shapes}
        for piece in file_slices(arch, rank):
            self._slices[piece.param].append(piece)
        self._dtypes = {param: self._dtype(param) for param in self._shapes}
        self._params: dict[MetadataIndex, str] = {}
        self.count: Callable[[int], None]
        """Called for every item that is written."""

    def items(self, name: Callable[[str], str]) -> list[WriteItem]:
        """The items to write: a piece per parameter, and the extra states of linear layers. `name` returns a parameter's name."""
        items, dtypes = list[WriteItem](), dict[str, torch.dtype]()
        for param, shape in self._shapes.items():
            key, place, counts = stacked(name(param), self._arch)
            dtype = self._dtypes[param]
            if dtypes.setdefault(key, dtype) != dtype:
                raise ConfigError(
                    f"one dtype in all layers of {key}", f"{dtypes[key]} and {dtype}", "Convert the model to one dtype."
                )
            offsets, sizes = torch.Size((*place, *(0,) * len(shape))), torch.Size((*(1,) * len(place), *shape))
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size((*counts, *shape))
            )
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
            self._params[items[-1].index] = param
            if _LINEAR.search(param):
                shard = ".".join(map(str, place or (0,))), ".".join(map(str, counts or (1,)))
                state = f"{key.removesuffix('weight')}_extra_state/shard_{'_'.join(shard)}"
                items.append(WriteItem(MetadataIndex(state), WriteItemType.BYTE_IO))
        return items

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.count(1)
        if write_item.type is WriteItemType.BYTE_IO:
            torch.save([None], state := io.BytesIO())
            return state
        param = self._params[write_item.index]
        whole = assembled(param, self._shapes[param], self._slices[param], self._tensors, self._dtypes[param])
        assert write_item.tensor_data is not None
        return whole.view(write_item.tensor_data.chunk.sizes)

    def _dtype(self, param: str) -> torch.dtype:
        """The dtype of a parameter's tensors; for one without tensors, such as a critic's bias, that of the first tensor."""
        name = self._slices[param][0].hf_name if self._slices[param] else next(iter(self._tensors))
        return self._tensors[name].dtype
