"""Digests: whether the bytes in a slot are the bytes the trainer wrote.

xxh3_64 reads memory faster than one core can copy it, so one thread does.
"""

from dataclasses import replace

import xxhash

from polyreme.weights.manifest import Manifest, ManifestError


class DigestError(ValueError):
    """A tensor's bytes are not those its manifest was sealed with."""


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
        DigestError: a tensor differs; all that do are named.
        ManifestError: the manifest is not sealed, or the buffer is shorter than the part.
    """
    _fits(manifest, buffer)
    if not manifest.sealed:
        raise ManifestError("there are no digests to verify against")
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
        raise ManifestError(f"the part has {manifest.nbytes} bytes, the slot {buffer.nbytes}")
