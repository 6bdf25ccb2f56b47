"""A part of a version as its bytes arrive in order: each tensor is hashed on the way, and checked when its last byte is there.

Kept here: the bytes before `position` are in the buffer, and every tensor that ends there is the one that the manifest was sealed
with. No byte goes beyond the part.
"""

import numpy as np
import xxhash

from polyreme.weights.digest import DigestError
from polyreme.weights.manifest import Manifest, ManifestError


class RangeError(ValueError):
    """Bytes that are not the next ones of the part."""


class Assembly:
    """One part, from its first byte to its last. `broken`: it has turned out wrong, and takes no further bytes.

    Args:
        manifest: sealed.
        buffer: writable, where the part goes; at least as long as it.

    Raises:
        ManifestError: the manifest is not sealed, or the buffer too short.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        if not manifest.sealed:
            raise ManifestError("there are no digests to verify against")
        if manifest.nbytes > buffer.nbytes:
            raise ManifestError(f"the part has {manifest.nbytes} bytes, the slot {buffer.nbytes}")
        self.manifest, self.position = manifest, 0
        self._target = np.frombuffer(buffer, np.uint8)
        self._coming = sorted(
            (tensor for tensor in manifest.tensors if not tensor.alias_of), key=lambda tensor: (tensor.offset, tensor.nbytes)
        )
        self._coming.reverse()
        self._hash = xxhash.xxh3_64()
        self.broken = False
        self._check_empty()

    @property
    def complete(self) -> bool:
        """Whether every byte is there, and right."""
        return self.position == self.manifest.nbytes and not self._coming and not self.broken

    def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes. Another thread may do it, one call at a time: the interpreter's lock is let go for the most part.

        Raises:
            RangeError: they are not the next ones, or go beyond the part. Nothing has changed.
            DigestError: a tensor is not the one that was sealed.
        """
        end = offset + len(data)
        if self.broken or offset != self.position or end > self.manifest.nbytes:
            raise RangeError(
                f"expected bytes from {self.position} on, up to {self.manifest.nbytes}; found {len(data)} from {offset} on"
            )
        np.copyto(self._target[offset:end], np.frombuffer(data, np.uint8))
        self.position = end
        while self._coming and self._coming[-1].offset < end:
            tensor = self._coming[-1]
            stop = tensor.offset + tensor.nbytes
            self._hash.update(data[max(tensor.offset - offset, 0) : min(stop, end) - offset])
            if stop > end:
                return
            self._check()
        self._check_empty()

    def _check_empty(self) -> None:
        while self._coming and self._coming[-1].nbytes == 0 and self._coming[-1].offset <= self.position:
            self._check()

    def _check(self) -> None:
        tensor = self._coming.pop()
        if self._hash.intdigest() != tensor.digest:
            self.broken = True
            raise DigestError(f"version {self.manifest.version}: {tensor.name} differs")
        self._hash.reset()
