"""Deltas: a part of a version, as its changes since another version. Pure.

Invariant: a delta applied to bytes with the digests of its base gives bytes with the digests of its manifest, which are those of
the whole version. The digests of both ends are verified, so no other bytes are ever used as the version.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import xxhash

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights import sparse
from polyreme.weights.digest import MapFunction
from polyreme.weights.manifest import NUMPY_DTYPES, Manifest, ManifestError, Tensor
from polyreme.weights.sparse import Changes, Frame, Words, words_of

DENSE_ABOVE = 0.25  # changed elements of a tensor: above, positions cost more than the values that they save
WHOLE_ABOVE = 0.5  # bytes of the whole part


class DeltaError(ValueError):
    """A delta does not fit the bytes or the delta that it was combined with."""


@dataclass(frozen=True)
class TensorDelta:
    """The changes of one tensor: `nbytes` bytes of the payload. `before`: digest in the base. See `sparse.Frame` for the others.

    `digest`: xxh3_64 of these bytes; 0 without any.
    """

    changed: int
    words: int
    nbytes: int
    before: int
    digest: int = 0


@dataclass(frozen=True)
class FramePlace:
    """A tensor's frame in the payload: `nbytes` bytes from `offset` on, and their xxh3_64."""

    name: str
    offset: int
    nbytes: int
    digest: int


@dataclass(frozen=True)
class DeltaManifest:
    """The content of a delta's payload.

    Attributes:
        manifest: sealed manifest of the resulting version.
        base_term, base_version: the base version, only for messages; digests identify it.
        tensors: one per tensor with its own bytes, in the manifest's order.

    Raises:
        ManifestError: the tensors are not those of the manifest, the manifest is not sealed, or the payload exceeds WHOLE_ABOVE.
    """

    manifest: Manifest
    base_term: int
    base_version: int
    tensors: tuple[TensorDelta, ...]

    def __post_init__(self) -> None:
        own = _own(self.manifest)
        if len(own) != len(self.tensors) or not self.manifest.sealed:
            raise ManifestError(f"expected a sealed manifest and changes of its {len(own)} tensors; found {len(self.tensors)}")
        most = WHOLE_ABOVE * self.manifest.nbytes
        if self.nbytes > most:
            raise ManifestError(f"expected a delta of at most {most:.0f} bytes; found {self.nbytes}")

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def frames(self) -> list[FramePlace]:
        """The frames in the payload, in order."""
        places, start = [], 0
        for tensor, change in zip(_own(self.manifest), self.tensors, strict=True):
            if change.nbytes:
                places.append(FramePlace(f"the delta of {tensor.name}", start, change.nbytes, change.digest))
            start += change.nbytes
        return places

    @property
    def density(self) -> float:
        """Fraction of the elements that are in the payload."""
        elements = sum(_size(tensor) for tensor in _own(self.manifest))
        return sum(tensor.changed for tensor in self.tensors) / max(1, elements)

    @property
    def base(self) -> Manifest:
        """The manifest of the base's bytes."""
        before = iter(self.tensors)
        tensors = tuple(t if t.alias_of else replace(t, digest=next(before).before) for t in self.manifest.tensors)
        return replace(self.manifest, term=self.base_term, version=self.base_version, tensors=tensors)

    def to_proto(self) -> pb.DeltaManifest:
        run_id = self.manifest.run_id
        tensors = [
            pb.TensorDelta(changed=t.changed, words=t.words, nbytes=t.nbytes, digest_before=t.before, digest=t.digest)
            for t in self.tensors
        ]
        base = pb.VersionId(run_id=run_id, term=self.base_term, version=self.base_version)
        return pb.DeltaManifest(manifest=self.manifest.to_proto(), base=base, tensors=tensors)

    @classmethod
    def from_proto(cls, message: pb.DeltaManifest) -> "DeltaManifest":
        """Raises ManifestError when the message is inconsistent."""
        tensors = tuple(TensorDelta(t.changed, t.words, t.nbytes, t.digest_before, t.digest) for t in message.tensors)
        return cls(Manifest.from_proto(message.manifest), message.base.term, message.base.version, tensors)


@dataclass(frozen=True)
class WeightDelta:
    """A manifest and its payload: the frames of all tensors, in order."""

    manifest: DeltaManifest
    payload: bytes


def diff(before: Manifest, old: memoryview, after: Manifest, new: memoryview, each: MapFunction = map) -> WeightDelta | None:
    """The changes of a part since another version of it; None when they are more than half of the part's bytes.

    Args:
        before, after: sealed manifests of the same layout; `old` and `new` hold their bytes.
        each: maps over the tensors. Comparing and compressing release the GIL.

    Raises:
        DeltaError: the layouts differ.
        ManifestError: a manifest is not sealed.
    """
    _check_same_layout(before, after)

    def compare(pair: tuple[Tensor, Tensor]) -> Frame | None:
        was, now = pair
        if was.digest == now.digest:
            return None
        words = _words(now, new)
        positions = sparse.find_changes(_words(was, old), words)
        if len(positions) > DENSE_ABOVE * len(words):
            return sparse.encode(Changes(None, words))
        return sparse.encode(Changes(positions, words[positions])) if len(positions) else None

    frames = list(each(compare, zip(_own(before), _own(after), strict=True)))
    return _assembled(before, after, frames)


def apply(delta: DeltaManifest, payload: memoryview, shadow: memoryview, each: MapFunction = map) -> None:
    """Writes the changes into bytes that hold the base. Verify them afterwards.

    Args:
        each: maps over the tensors. Decompressing and writing release the GIL.

    Raises:
        DeltaError: the payload has another size.
        FrameError: a frame is damaged. The bytes are then a mixture.
    """

    def write(pair: tuple[Tensor, Frame | None]) -> None:
        tensor, frame = pair
        if frame is not None:
            sparse.apply(sparse.decode(frame, _itemsize(tensor), _size(tensor)), _words(tensor, shadow))

    deque(each(write, _frames(delta, payload)), maxlen=0)


def compact(older: WeightDelta, newer: WeightDelta) -> WeightDelta | None:
    """One delta with the effect of both, one after the other; None when it is more than half of the part's bytes.

    Raises:
        DeltaError: `newer` does not start where `older` ends.
    """
    if older.manifest.manifest.tensors != newer.manifest.base.tensors:
        raise DeltaError(
            f"expected a delta from version {older.manifest.manifest.version}; found one from {newer.manifest.base_version}"
        )
    frames: list[Frame | None] = []
    pairs = zip(
        _frames(older.manifest, memoryview(older.payload)), _frames(newer.manifest, memoryview(newer.payload)), strict=True
    )
    for (tensor, first), (_, second) in pairs:
        if first is None or second is None:
            frames.append(first or second)
        else:
            decoded = (sparse.decode(frame, _itemsize(tensor), _size(tensor)) for frame in (first, second))
            frames.append(sparse.encode(sparse.merge(*decoded)))
    return _assembled(older.manifest.base, newer.manifest.manifest, frames)


def _assembled(before: Manifest, after: Manifest, frames: list[Frame | None]) -> WeightDelta | None:
    tensors = tuple(
        TensorDelta(frame.changed, frame.words, len(frame.data), was.digest or 0, xxhash.xxh3_64_intdigest(frame.data))
        if frame
        else TensorDelta(0, 0, 0, was.digest or 0)
        for was, frame in zip(_own(before), frames, strict=True)
    )
    if sum(tensor.nbytes for tensor in tensors) > WHOLE_ABOVE * after.nbytes:
        return None
    return WeightDelta(
        DeltaManifest(after, before.term, before.version, tensors), b"".join(frame.data for frame in frames if frame)
    )


def _frames(delta: DeltaManifest, payload: memoryview) -> Iterator[tuple[Tensor, Frame | None]]:
    """Yields each tensor with its frame; None for an unchanged tensor."""
    if payload.nbytes != delta.nbytes:
        raise DeltaError(f"expected a payload of {delta.nbytes} bytes; found {payload.nbytes}")
    start = 0
    for tensor, change in zip(_own(delta.manifest), delta.tensors, strict=True):
        data = payload[start : start + change.nbytes]
        start += change.nbytes
        yield tensor, Frame(change.changed, change.words, data) if change.nbytes else None


def _check_same_layout(before: Manifest, after: Manifest) -> None:
    if not before.sealed or not after.sealed:
        raise ManifestError("expected sealed manifests; found one without digests")
    if _layout(before) != _layout(after):
        raise DeltaError(f"expected the layout of version {before.version} in version {after.version}; found another one")


def _layout(manifest: Manifest) -> tuple[object, ...]:
    return manifest.part, manifest.parts, tuple(replace(tensor, digest=None) for tensor in manifest.tensors)


def _own(manifest: Manifest) -> list[Tensor]:
    return [tensor for tensor in manifest.tensors if not tensor.alias_of]


def _itemsize(tensor: Tensor) -> int:
    return NUMPY_DTYPES[tensor.dtype].itemsize


def _size(tensor: Tensor) -> int:
    return tensor.nbytes // _itemsize(tensor)


def _words(tensor: Tensor, buffer: memoryview) -> Words:
    return words_of(buffer[tensor.offset : tensor.offset + tensor.nbytes], _itemsize(tensor))
