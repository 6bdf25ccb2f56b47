"""Values and messages between a test and an untrusted program.

Invariant: `decode` returns exact types of Python for any input. Every other object is a numbered reference without equality. A
message is a frame: a length of four bytes, then JSON.
"""

import importlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

FRAME_BYTES = 16 << 20
_HEADER = struct.Struct("<I")
_LIBRARY = {"Fraction": "fractions", "Decimal": "decimal", "deque": "collections", "range": "builtins"}
_LIBRARY |= dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime")
"""Types of values, and their modules, of which few programs need any. Values travel as the arguments that make them."""


class Unplain(Exception):
    """A value that cannot be transferred."""


def encode(value: Any, reference: Callable[[Any], int]) -> Any:
    """Encodes a value in JSON types. `reference(value)` returns the number of an object that is not plain, or raises Unplain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return {"int": hex(int.__index__(value))}
    if isinstance(value, float):
        return {"float": float.__repr__(float.__float__(value))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(each, reference) for each in value]}
    if isinstance(value, (set, frozenset)):
        return {"frozenset" if isinstance(value, frozenset) else "set": [encode(each, reference) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, reference), encode(each, reference)] for key, each in dict.items(value)]}
    kind, module = type(value).__name__, type(value).__module__
    if module == _LIBRARY.get(kind) and not getattr(value, "tzinfo", None):
        arguments = [list(value)] if kind == "deque" else value.__reduce__()[1]
        return {kind: [encode(each, reference) for each in arguments]}
    if (module, kind) == ("numpy", "ndarray") and value.dtype.kind in "biufc" and value.size < 1 << 16:
        return {kind: [encode(value.tolist(), reference), value.dtype.name, list(value.shape)]}
    numpy_scalar = getattr(sys.modules.get("numpy"), "generic", ())
    if isinstance(value, numpy_scalar) and not isinstance(plain := value.item(), numpy_scalar):
        return encode(plain, reference)
    return {"reference": reference(value)}


def decode(data: Any, dereference: Callable[[Any], Any]) -> Any:
    """Decodes the result of `encode`. `dereference(number)` returns the object of a reference. Raises ValueError, TypeError,
    KeyError, ArithmeticError."""
    if data is None or data is True or data is False or type(data) is str:
        return data
    if type(data) is not dict or len(data) != 1:
        raise ValueError("no value")
    ((kind, body),) = data.items()
    if kind == "int":
        return int(body, 16)
    if kind == "float":
        return float(body)
    if kind == "complex":
        return complex(*map(float, body))
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "dict":
        return {decode(key, dereference): decode(value, dereference) for key, value in body}
    if kind == "reference":
        return dereference(body)
    if kind in _LIBRARY:
        return getattr(importlib.import_module(_LIBRARY[kind]), kind)(*(decode(each, dereference) for each in body))
    if kind == "ndarray":
        return importlib.import_module("numpy").array(decode(body[0], dereference), str(body[1])).reshape(body[2])
    return _KINDS[kind](decode(each, dereference) for each in body)


_KINDS: dict[str, Callable[[Iterable[object]], object]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def frame(message: object) -> bytes:
    """One frame. Raises Unplain beyond FRAME_BYTES bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > FRAME_BYTES:
        raise Unplain(f"a value of {len(body)} bytes")
    return _HEADER.pack(len(body)) + body


def send(fd: int, message: object) -> None:
    """Writes one frame. Raises Unplain as `frame`."""
    data = frame(message)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, limit: int = FRAME_BYTES) -> Any:
    """The next message. Raises EOFError at the end and ValueError for an invalid message, or one beyond `limit` bytes."""
    (size,) = _HEADER.unpack(_exactly(fd, _HEADER.size))
    if size > limit:
        raise ValueError(f"expected a frame of at most {limit} bytes; found {size}")
    return json.loads(_exactly(fd, size))


def _exactly(fd: int, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data
