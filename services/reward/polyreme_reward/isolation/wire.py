"""Frames between the pool and its workers: a length, then JSON. Invariant: a frame beyond the limit is an error on both sides."""

import json
import struct
from typing import Any

HEADER = struct.Struct("<I")
FRAME_LIMIT = 256 << 20


def encode(message: Any) -> bytes:
    """One frame. Texts stay ASCII on the wire, so that lone surrogates survive."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(body) > FRAME_LIMIT:
        raise ValueError(f"expected a frame of at most {FRAME_LIMIT} bytes; found {len(body)}")
    return HEADER.pack(len(body)) + body
