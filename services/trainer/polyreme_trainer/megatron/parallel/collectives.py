"""Sums of tensors over the ranks of a group.

Invariant: no float64 tensor is reduced by a backend. HCCL has no such reduction, and the `all_reduce` that MindSpeed puts in
place of torch's leaves such a tensor as it was, without an error.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums a contiguous `tensor` over the ranks of `group` in place, and returns it. Collective.

    float64 is for small tensors: every rank receives all parts, and adds them in the order of the ranks.
    """
    if tensor.dtype != torch.float64:
        dist.all_reduce(tensor, group=group)
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return tensor.copy_(torch.stack(parts).sum(0))
