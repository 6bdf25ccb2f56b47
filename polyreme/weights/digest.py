"""Digests, which prove that the bytes in a slot are the bytes that the trainer wrote.

Invariant: a verified slot matches the digest of every tensor. One thread reads memory faster by xxh3_64 than it copies it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

import xxhash

from polyreme.weights.manifest import Manifest, ManifestError

T = TypeVar("T")
U = TypeVar("U")


class MapFunction(Protocol):
    """`map`, or the `map` of an executor."""

    def __call__(self, function: Callable[[T], U], values: Iterable[T], /) -> Iterable[U]: ...


class DigestError(ValueError):
    """The bytes of a tensor do not match the digest in its manifest."""


def seal(manifest: Manifest, buffer: memoryview) -> Manifest:
    """The manifest with the digest of every tensor, read from the slot's data.

    Raises:
        ManifestError: the buffer is shorter than the part.
    """
    _fits(manifest, buffer)
    tensors = tuple(
        tensor if tensor.alias_of else replace(tensor, digest=_digest(buffer, tensor.offset, tensor.nbytes))
        for tensor in manifest.tensors
    )
    return replace(manifest, tensors=tensors)


def verify(manifest: Manifest, buffer: memoryview, each: MapFunction = map) -> None:
    """Reads every tensor's bytes once. `each`: maps over the tensors; hashing releases the GIL.

    Raises:
        DigestError: tensors differ; the message names the first and their number.
        ManifestError: the manifest is not sealed, or the buffer is shorter than the part.
    """
    _fits(manifest, buffer)
    if not manifest.sealed:
        raise ManifestError("expected a sealed manifest; found one without digests")
    own = [tensor for tensor in manifest.tensors if not tensor.alias_of]
    digests = each(lambda tensor: _digest(buffer, tensor.offset, tensor.nbytes), own)
    wrong = [tensor.name for tensor, digest in zip(own, digests, strict=True) if digest != tensor.digest]
    if wrong:
        raise DigestError(f"version {manifest.version}: {len(wrong)} of {len(manifest.tensors)} tensors differ, first {wrong[0]}")


def _digest(buffer: memoryview, offset: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(buffer[offset : offset + nbytes])


def _fits(manifest: Manifest, buffer: memoryview) -> None:
    if manifest.nbytes > buffer.nbytes:
        raise ManifestError(f"expected a slot of {manifest.nbytes} bytes; found {buffer.nbytes}")
