"""The wire format of a version's bytes: StageStreamRequest messages that are encoded and decoded without protobuf.

Invariant: every message is a valid protobuf message of that schema. Only messages of this module's own encoding are read without
a copy. (Protobuf takes several times as long for a mebibyte as the network stack.)
"""

import ctypes
from contextlib import suppress
from functools import cache

from google.protobuf.message import DecodeError

from polyreme.api.v1 import weights_pb2 as pb

STAGE_STREAM = "/polyreme.api.v1.WeightsService/StageStream"
FETCH = "/polyreme.api.v1.WeightsService/Fetch"
CHUNK_BYTES = 1 << 20  # larger chunks leave the processor's cache before they are hashed
LONGEST_CHUNK_BYTES = 8 << 20
MAX_FETCHES = 2  # maximum number of concurrent fetches of a part from one replica, which also generates
SLOWEST_STREAM_BYTES_PER_SECOND = 2e6  # a slower stream is ended even if it progresses

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of glibc's mallopt
_KEPT_BYTES, _LARGEST_BYTES = 256 << 20, 32 << 20

_OFFSET, _DATA = 0x11, 0x1A  # field 2 of 8 bytes, field 3 of a length
_HEAD = 10


class WireError(ValueError):
    """An unexpected message."""


@cache
def keep_memory() -> None:
    """Makes the C library keep the memory of messages for later ones. Call it before a process's first stream.

    Without it, the library returns each message's pages and the kernel clears new ones, costing more than the rest of a stream.
    """
    with suppress(AttributeError):  # a C library that is not glibc
        tune = ctypes.CDLL(None).mallopt
        tune(_MMAP_THRESHOLD, _LARGEST_BYTES)
        tune(_TRIM_THRESHOLD, _KEPT_BYTES)


def encode_manifest(manifest: pb.Manifest) -> bytes:
    """The first message of a stream."""
    return pb.StageStreamRequest(manifest=manifest).SerializeToString()


def encode_delta(delta: pb.DeltaManifest) -> bytes:
    """The first message of a stream that brings a delta."""
    return pb.StageStreamRequest(delta=delta).SerializeToString()


def encode_chunk(offset: int, data: memoryview) -> bytes:
    """A message with bytes. Copies `data` once."""
    return b"".join((bytes([_OFFSET]), offset.to_bytes(8, "little"), bytes([_DATA]), _varint(len(data)), data))


def decode_manifest(message: bytes) -> pb.Manifest | pb.DeltaManifest:
    """The manifest of a part or of a delta. Raises WireError when the message has none."""
    request = _parse(message)
    if request.HasField("delta"):
        return request.delta
    if not request.HasField("manifest"):
        raise WireError("expected the manifest first; found bytes")
    return request.manifest


def decode_chunk(message: bytes) -> tuple[int, memoryview]:
    """Offset and bytes, which share the message's memory. Raises WireError when the message has no bytes, or too many."""
    view = memoryview(message)
    if len(view) > _HEAD and view[0] == _OFFSET and view[_HEAD - 1] == _DATA:
        size, start = 0, _HEAD
        for shift in range(0, 35, 7):
            if start == len(view):
                break
            byte, start = view[start], start + 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        if start + size == len(view):
            return _checked(int.from_bytes(view[1:9], "little"), view[start:])
    request = _parse(message)
    if request.HasField("manifest") or request.HasField("delta") or not request.HasField("offset"):
        raise WireError("expected bytes at an offset; found a manifest or no offset")
    return _checked(request.offset, memoryview(request.data))


def _checked(offset: int, data: memoryview) -> tuple[int, memoryview]:
    if not 0 < len(data) <= LONGEST_CHUNK_BYTES:
        raise WireError(f"expected 1 to {LONGEST_CHUNK_BYTES} bytes in a message; found {len(data)}")
    return offset, data


def _parse(message: bytes) -> pb.StageStreamRequest:
    try:
        return pb.StageStreamRequest.FromString(message)
    except DecodeError as error:
        raise WireError(f"expected a StageStreamRequest; found other bytes ({error})") from None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
