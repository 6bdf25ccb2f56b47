"""Moves tensors between a device and the host's memory without changing their views.

Invariant: it moves a tensor's storage, whose device memory is freed and allocated again in place. So parameters, their views in
gradient buffers, moments and full-precision copies, which share storages in many ways, stay valid. After `restore`, every kept
byte has its old value, and every dropped one is zero.
"""

from collections.abc import Callable, Iterable

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
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for storage in keep.values():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
            copy.copy_(_bytes(storage))
            self._kept[storage._cdata] = storage, copy
            storage.resize_(0)
        for storage, _ in self._dropped:
            storage.resize_(0)
        self.nbytes = sum(size for _, size in self._dropped) + sum(copy.numel() for _, copy in self._kept.values())
        """Bytes that have left the device."""

    def restore(self) -> None:
        """Restores all storages on the device."""
        while self._kept:
            _, (storage, copy) = self._kept.popitem()
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._dropped = []

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A kept tensor as a view of its copy in host memory. Raises KeyError when it was not kept."""
        _, copy = self._kept[tensor.untyped_storage()._cdata]
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class Movable:
    """Tensors that move together between a device and the host's memory.

    Args:
        tensors: lists the tensors. The list may grow between two moves.
        pin: as in `Offload`.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], pin: bool) -> None:
        self._tensors, self._pin = tensors, pin
        self._away: Offload | None = None

    @property
    def is_away(self) -> bool:
        """Whether the tensors are in the host's memory."""
        return self._away is not None

    def leave(self) -> int:
        """Moves the tensors to the host's memory. Returns the bytes moved; 0 if they are already there."""
        if self._away is not None:
            return 0
        self._away = Offload(self._tensors(), (), self._pin)
        return self._away.nbytes

    def come_back(self) -> int:
        """Moves the tensors to the device. Returns the bytes moved; 0 if they are already there."""
        if self._away is None:
            return 0
        moved, self._away = self._away, None
        moved.restore()
        return moved.nbytes

    def now(self, tensor: Tensor) -> Tensor:
        """One of the tensors: itself while it is on the device, otherwise a view of its copy in host memory."""
        return tensor if self._away is None else self._away.copy_of(tensor)


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
