"""Assembles a part of a version from bytes that arrive in order. Each tensor is hashed on arrival and verified at its last byte.

Invariant: the bytes before `position` are in the buffer, and every tensor that ends before it matches its digest. No byte is written beyond
the part.
"""

import numpy as np
import xxhash

from polyreme.weights.digest import DigestError, verify
from polyreme.weights.manifest import Manifest, ManifestError


class RangeError(ValueError):
    """The bytes are not the next bytes of the part."""


class Assembly:
    """One part, from its first byte to its last. `broken`: a digest did not match, and no further bytes are accepted.

    Args:
        manifest: sealed.
        buffer: writable destination, at least as long as the part.

    Raises:
        ManifestError: the manifest is not sealed, or the buffer is too short.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        if not manifest.sealed:
            raise ManifestError("expected a sealed manifest; found one without digests")
        if manifest.nbytes > buffer.nbytes:
            raise ManifestError(f"expected a slot of {manifest.nbytes} bytes; found {buffer.nbytes}")
        self.manifest, self.position = manifest, 0
        self._target = np.frombuffer(buffer, np.uint8)
        self._pending = sorted(
            (tensor for tensor in manifest.tensors if not tensor.alias_of), key=lambda tensor: (tensor.offset, tensor.nbytes)
        )
        self._pending.reverse()
        self._hash = xxhash.xxh3_64()
        self.broken = False
        self._check_empty()

    @classmethod
    def verified(cls, manifest: Manifest, buffer: memoryview) -> "Assembly":
        """A complete part that is in the buffer already. Reads it once. Raises DigestError, and as the constructor."""
        verify(manifest, buffer)
        assembly = cls(manifest, buffer)
        assembly.position, assembly._pending = manifest.nbytes, []
        return assembly

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and every digest matches."""
        return self.position == self.manifest.nbytes and not self._pending and not self.broken

    def add(self, offset: int, data: memoryview) -> None:
        """Adds the next bytes. Another thread may call it, one call at a time; it releases the GIL for most of the work.

        Raises:
            RangeError: they are not the next bytes, or exceed the part. Nothing has changed.
            DigestError: a tensor does not match its digest.
        """
        end = offset + len(data)
        if self.broken or offset != self.position or end > self.manifest.nbytes:
            raise RangeError(
                f"expected bytes from {self.position} on, up to {self.manifest.nbytes}; found {len(data)} from {offset} on"
            )
        np.copyto(self._target[offset:end], np.frombuffer(data, np.uint8))
        self.position = end
        while self._pending and self._pending[-1].offset < end:
            tensor = self._pending[-1]
            stop = tensor.offset + tensor.nbytes
            self._hash.update(data[max(tensor.offset - offset, 0) : min(stop, end) - offset])
            if stop > end:
                return
            self._check()
        self._check_empty()

    def _check_empty(self) -> None:
        while self._pending and self._pending[-1].nbytes == 0 and self._pending[-1].offset <= self.position:
            self._check()

    def _check(self) -> None:
        tensor = self._pending.pop()
        if self._hash.intdigest() != tensor.digest:
            self.broken = True
            raise DigestError(f"version {self.manifest.version}: {tensor.name} differs")
        self._hash.reset()
