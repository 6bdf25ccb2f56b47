"""Rank 0's messages to the other ranks, as torch.distributed broadcasts.

Invariant: `send` on rank 0 and `receive` on every other rank run the same collectives in the same order.
"""

import torch
import torch.distributed as dist


class BroadcastChannel:
    """A channel over the default process group.

    Args:
        device: the device of a broadcast's buffers, which depends on the collective backend (cpu for gloo).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, kind: int, payload: bytes) -> None:
        """Sends a message from rank 0 to all other ranks."""
        dist.broadcast(torch.tensor([kind, len(payload)], dtype=torch.int64, device=self._device), src=0)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device), src=0)

    def receive(self) -> tuple[int, bytes]:
        """Receives the next message: its kind and its bytes."""
        head = torch.empty(2, dtype=torch.int64, device=self._device)
        dist.broadcast(head, src=0)
        kind, size = (int(x) for x in head.tolist())
        if not size:
            return kind, b""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=0)
        return kind, buffer.cpu().numpy().tobytes()
