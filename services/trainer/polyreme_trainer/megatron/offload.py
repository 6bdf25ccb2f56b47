"""Moves tensors between a device and the host's memory without changing their views.

Invariant: it moves a tensor's storage, whose device memory is freed and allocated again in place. So parameters, their views in gradient
buffers, moments and full-precision copies, which share storages in many ways, stay valid. After `restore`, every kept byte has its old
value, and every dropped one is zero.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """The storages that have left a device.

    Args:
        kept: tensors whose bytes are kept in host memory.
        dropped: tensors whose bytes are no longer needed.
        pin: whether to use page-locked host memory, from which an accelerator copies faster.
    """

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor], pin: bool) -> None:
        drop = {_address(tensor): tensor.untyped_storage() for tensor in dropped if tensor.untyped_storage().nbytes()}
        keep = {_address(tensor): tensor.untyped_storage() for tensor in kept if tensor.untyped_storage().nbytes()}
        self._dropped = [(storage, storage.nbytes()) for address, storage in drop.items() if address not in keep]
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in keep.values():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
            copy.copy_(_bytes(storage))
            self._kept.append((storage, copy))
        self.nbytes = sum(size for _, size in self._dropped) + sum(copy.numel() for _, copy in self._kept)
        """Bytes freed on the device."""
        for storage in (*(storage for storage, _ in self._dropped), *keep.values()):
            storage.resize_(0)

    def restore(self) -> None:
        """Restores all storages on the device."""
        for storage, copy in self._kept:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._kept, self._dropped = [], []


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
