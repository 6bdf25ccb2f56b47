"""Assembles a part of a version, or a delta's payload, from bytes that arrive in order. Each range is hashed on arrival and
verified at its last byte.

Invariant: bytes before `position` are in the buffer, those before `verified` match their digests. None is written beyond the end.
"""

from collections.abc import Iterable

import numpy as np
import xxhash

from polyreme.weights.delta import FramePlace
from polyreme.weights.digest import DigestError, MapFunction, verify
from polyreme.weights.manifest import Manifest, ManifestError, Tensor


class RangeError(ValueError):
    """The bytes are not the next bytes of the part."""


class RangeAssembly:
    """Ranges with digests, from the first byte to the last. `broken`: a digest did not match, and no further bytes are accepted.

    Args:
        ranges: they do not overlap.
        nbytes: end of the last range.
        buffer: writable destination of at least `nbytes` bytes.
        title: name of the whole, for messages.
    """

    def __init__(self, ranges: Iterable[Tensor | FramePlace], nbytes: int, buffer: memoryview, title: str) -> None:
        self.nbytes, self.position, self.broken = nbytes, 0, False
        self._title, self._target = title, np.frombuffer(buffer, np.uint8)
        self._pending = sorted(ranges, key=lambda part: (part.offset, part.nbytes), reverse=True)
        self._hash = xxhash.xxh3_64()
        self._check_empty()

    @property
    def verified(self) -> int:
        """The end of the bytes that match their digests."""
        return min(self.position, self._pending[-1].offset) if self._pending else self.position

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived and every digest matches."""
        return self.position == self.nbytes and not self._pending and not self.broken

    def add(self, offset: int, data: memoryview) -> None:
        """Adds the next bytes. Another thread may call it, one call at a time; it releases the GIL for most of the work.

        Raises:
            RangeError: they are not the next bytes, or exceed the end. Nothing has changed.
            DigestError: a range does not match its digest.
        """
        end = offset + len(data)
        if self.broken or offset != self.position or end > self.nbytes:
            raise RangeError(f"expected bytes from {self.position} on, up to {self.nbytes}; found {len(data)} from {offset} on")
        np.copyto(self._target[offset:end], np.frombuffer(data, np.uint8))
        self.position = end
        while self._pending and self._pending[-1].offset < end:
            part = self._pending[-1]
            stop = part.offset + part.nbytes
            self._hash.update(data[max(part.offset - offset, 0) : min(stop, end) - offset])
            if stop > end:
                return
            self._check()
        self._check_empty()

    def _check_empty(self) -> None:
        while self._pending and self._pending[-1].nbytes == 0 and self._pending[-1].offset <= self.position:
            self._check()

    def _check(self) -> None:
        part = self._pending[-1]
        if self._hash.intdigest() != part.digest:
            self.broken = True
            raise DigestError(f"{self._title}: {part.name} differs")
        self._pending.pop()
        self._hash.reset()


class Assembly(RangeAssembly):
    """One part.

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
        self.manifest = manifest
        own = [tensor for tensor in manifest.tensors if not tensor.alias_of]
        super().__init__(own, manifest.nbytes, buffer, f"version {manifest.version}")

    @classmethod
    def verified_part(cls, manifest: Manifest, buffer: memoryview, each: MapFunction = map) -> "Assembly":
        """The assembly of a part that is complete in the buffer. Raises as `verify`, and as the constructor."""
        verify(manifest, buffer, each)
        assembly = cls(manifest, buffer)
        assembly.position, assembly._pending = manifest.nbytes, []
        return assembly
