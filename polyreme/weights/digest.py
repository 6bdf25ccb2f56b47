"""Digests, which prove that the bytes in a slot are the bytes that the trainer wrote.

Invariant: a verified slot matches the digest of every tensor. One thread is enough: xxh3_64 reads memory faster than a core copies it.
"""

from dataclasses import replace

import xxhash

from polyreme.weights.manifest import Manifest, ManifestError


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


def verify(manifest: Manifest, buffer: memoryview) -> None:
    """Reads every tensor's bytes once.

    Raises:
        DigestError: tensors differ; the message names the first and their number.
        ManifestError: the manifest is not sealed, or the buffer is shorter than the part.
    """
    _fits(manifest, buffer)
    if not manifest.sealed:
        raise ManifestError("expected a sealed manifest; found one without digests")
    wrong = [
        tensor.name
        for tensor in manifest.tensors
        if not tensor.alias_of and _digest(buffer, tensor.offset, tensor.nbytes) != tensor.digest
    ]
    if wrong:
        raise DigestError(f"version {manifest.version}: {len(wrong)} of {len(manifest.tensors)} tensors differ, first {wrong[0]}")


def _digest(buffer: memoryview, offset: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(buffer[offset : offset + nbytes])


def _fits(manifest: Manifest, buffer: memoryview) -> None:
    if manifest.nbytes > buffer.nbytes:
        raise ManifestError(f"expected a slot of {manifest.nbytes} bytes; found {buffer.nbytes}")
