"""Rank 0's messages to the other ranks, as torch.distributed broadcasts.

Invariant: `send` on rank 0 and `receive` on every other rank run the same collectives in the same order.
"""

import struct

import torch
import torch.distributed as dist

FRAME = 4096
"""Bytes of a message's first exchange. Nearly all messages are shorter, so they need no second one."""
_HEAD = struct.Struct("<qq")


class BroadcastChannel:
    """A channel over the default process group.

    Args:
        device: the device of a broadcast's buffers, which depends on the collective backend (cpu for gloo).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, kind: int, payload: bytes) -> None:
        """Sends a message from rank 0 to all other ranks."""
        message = _HEAD.pack(kind, len(payload)) + payload
        for part in filter(None, (message[:FRAME].ljust(FRAME), message[FRAME:])):
            dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(self._device), src=0)

    def receive(self) -> tuple[int, bytes]:
        """Receives the next message: its kind and its bytes."""
        message = self._receive(FRAME)
        kind, size = _HEAD.unpack_from(message)
        if (rest := _HEAD.size + size - FRAME) > 0:
            message += self._receive(rest)
        return kind, message[_HEAD.size : _HEAD.size + size]

    def _receive(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()
