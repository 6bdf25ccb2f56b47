"""Frames between the pool and its workers: a length, then JSON.

Invariant: a frame larger than FRAME_LIMIT is an error on both sides.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from polyreme.isolation.sandbox.inside import values

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
    try:
        return values.receive(channel.fileno(), FRAME_LIMIT)
    except EOFError:
        return None
