"""Frames between the pool and its workers: a length, then JSON.

Invariant: a frame larger than FRAME_LIMIT is an error on both sides.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

Setup = Mapping[str, Any]
"""The first message to a worker."""

HEADER = struct.Struct("<I")
FRAME_LIMIT = 256 << 20


def encode(message: object) -> bytes:
    """Encodes one frame. JSON escapes keep it ASCII, so lone surrogates survive. Raises ValueError beyond FRAME_LIMIT bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(body) > FRAME_LIMIT:
        raise ValueError(f"expected a frame of at most {FRAME_LIMIT} bytes; found {len(body)}")
    return HEADER.pack(len(body)) + body


def receive(channel: socket.socket) -> Any:
    """The next message, or None when the channel has closed. Raises ValueError beyond FRAME_LIMIT bytes."""
    header = _exactly(channel, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > FRAME_LIMIT:
        raise ValueError(f"expected a frame of at most {FRAME_LIMIT} bytes; found {size}")
    body = _exactly(channel, size)
    return None if body is None else json.loads(body)


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return data
