"""The parameters of Megatron's files: the mapping table, with a critic's head under Megatron's name.

Invariant: a parameter assembled from several tensors has their dtype. Tensors of different dtypes are refused, never converted.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert.names import CRITIC_BIAS, CRITIC_HEAD, OUTPUT_LAYER
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import VALUE_HEAD, Architecture, Shape
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, Slice


def file_slices(arch: Architecture, rank: Rank) -> Iterator[Slice]:
    """The slices of one rank's file."""
    for piece in hf_mapping.rank_slices(arch, rank):
        if piece.param != OUTPUT_LAYER or arch.head != "value":
            yield piece
            continue
        n = arch.hidden // rank.tp
        part = slice(rank.tp_rank * n, (rank.tp_rank + 1) * n)
        yield Slice(CRITIC_HEAD, VALUE_HEAD, (slice(0, 1), slice(0, n)), (slice(0, 1), part), rank.place < rank.tp)


def file_shapes(arch: Architecture, rank: Rank) -> dict[str, Shape]:
    """The parameters of one rank's file."""
    shapes = hf_mapping.param_shapes(arch, rank)
    if arch.head == "value" and OUTPUT_LAYER in shapes:
        del shapes[OUTPUT_LAYER]
        shapes |= {CRITIC_HEAD: (1, arch.hidden // rank.tp), CRITIC_BIAS: (1,)}
    return shapes


def assembled(param: str, shape: Shape, pieces: Sequence[Slice], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """A parameter from its slices of Hugging Face tensors; the rest of it, such as padding, is zero.

    Args:
        dtype: of the tensors, and of a parameter without slices.

    Raises:
        ConfigError: a tensor has another dtype.
    """
    whole = torch.zeros(shape, dtype=dtype)
    for piece in pieces:
        tensor = tensors[piece.hf_name]
        if tensor.dtype != dtype:
            raise ConfigError(
                f"{dtype} in all tensors of {param}", f"{tensor.dtype} in {piece.hf_name}", "Convert the model to one dtype."
            )
        whole[piece.param_index] = tensor[piece.hf_index]
    return whole
