"""Rank 0's messages to the other ranks, as torch.distributed broadcasts.

Invariant: `send` on rank 0 and `receive` on every other rank run the same collectives in the same order.
"""

import struct

import torch
import torch.distributed as dist

FRAME = 4096
"""Bytes of a message's first exchange. Nearly all messages are shorter, so they need no second exchange."""
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
        first, rest = payload[: FRAME - _HEAD.size], payload[FRAME - _HEAD.size :]
        for part in filter(None, ((_HEAD.pack(kind, len(payload)) + first).ljust(FRAME), rest)):
            dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(self._device), src=0)

    def receive(self) -> tuple[int, bytes]:
        """Receives the next message: its kind and its bytes."""
        first = self._receive(FRAME)
        kind, size = _HEAD.unpack_from(first)
        payload = first[_HEAD.size : _HEAD.size + size]
        rest = size - len(payload)
        return kind, payload + self._receive(rest) if rest else payload

    def _receive(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()
