"""Exchanges between tensor ranks with parts of different lengths. They replace megatron-core's, since gloo needs equal parts.

Invariant: a sum adds the ranks' parts in the order of the ranks, so the result is reproducible bit by bit.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from polyreme_trainer.megatron.mcore import mappings

_gather_equal, _reduce_scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def gather(
    part: Tensor, group: ProcessGroup, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """All ranks' parts, in order along the first dimension. output_split_sizes: each part's length; None for equal ones."""
    if output_split_sizes is None or group.size() == 1:
        return _gather_equal(part, group, None, use_global_buffer)
    ranks = group.size()
    whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
    copies = part.repeat(ranks, *[1] * (part.dim() - 1))
    torch.distributed.all_to_all_single(whole, copies, output_split_sizes, [len(part)] * ranks, group=group)
    return whole


def reduce_scatter(
    whole: Tensor, group: ProcessGroup, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """This rank's part along the first dimension of the sum of `whole` over the ranks. input_split_sizes: as in `gather`."""
    if input_split_sizes is None or group.size() == 1:
        return _reduce_scatter_equal(whole, group, None, use_global_buffer)
    ranks, mine = group.size(), input_split_sizes[group.rank()]
    parts = whole.new_empty(ranks * mine, *whole.shape[1:])
    torch.distributed.all_to_all_single(parts, whole.contiguous(), [mine] * ranks, input_split_sizes, group=group)
    return parts.unflatten(0, (ranks, mine)).sum(0)
