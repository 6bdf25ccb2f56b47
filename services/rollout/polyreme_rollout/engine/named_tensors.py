"""A version's parts as named tensors, for engines and workers that load it in their own process.

Invariant: the tensors are views of the arena's memory, and the bytes that the block read are the bytes that were verified.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from polyreme.weights.manifest import ArenaSource, Manifest, tensor_views
from polyreme_rollout.engine.arena_cache import ArenaCache

TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
}


@contextmanager
def named_tensors(sources: Sequence[ArenaSource], arenas: ArenaCache) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of all parts by Hugging Face name, without aliases: the model ties them itself. Read-only, valid in the block.

    Raises:
        ArenaError: a slot is not, or at the block's end no longer, of its generation. What the block loaded may then be mixed.
    """
    parts = [(arenas.with_nonce(source.path, source.nonce), source) for source in sources]
    for arena, source in parts:
        arena.check(source.slot, source.generation)
    yield {name: tensor for arena, source in parts for name, tensor in _views(source.manifest, arena.slot_view(source.slot))}
    for arena, source in parts:
        arena.check(source.slot, source.generation)


def _views(manifest: Manifest, buffer: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    views = tensor_views(manifest, buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nothing writes to it
        for tensor in manifest.tensors:
            if not tensor.alias_of:
                yield tensor.name, torch.from_numpy(views[tensor.name]).view(TORCH_DTYPES[tensor.dtype])
