"""The manifest of a version's bytes: names, dtypes, shapes and offsets. Pure.

Invariant: every manifest is consistent. Names are unique, every tensor lies inside the part at an aligned offset, tensors do not
overlap, and an alias refers to a tensor of the same dtype and shape with bytes of its own.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polyreme.api.v1 import weights_pb2 as pb

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs

# safetensors dtype names, and the numpy dtypes of their views: what numpy lacks (BF16, F8) appears as unsigned words of its size.
NUMPY_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"},
        **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"},
    }.items()
}


class ManifestError(ValueError):
    """A manifest is inconsistent, or does not fit its use."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor in Hugging Face's layout; `dtype` is a safetensors name (F32, BF16, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _numpy_dtype(self).itemsize


@dataclass(frozen=True)
class Tensor:
    """The location of a tensor in a slot: `nbytes` bytes from `offset` on, or, with `alias_of`, the bytes of that tensor.

    `digest` is the xxh3_64 of the bytes, or None before they are written. An alias has offset, nbytes and digest 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: int | None = None
    alias_of: str = ""


@dataclass(frozen=True)
class Manifest:
    """One part (of one trainer host) of one policy version.

    `nbytes` is the part's size: the end of its last tensor. Raises ManifestError when it is inconsistent.
    """

    run_id: str
    term: int
    version: int
    part: int
    parts: int
    tensors: tuple[Tensor, ...]
    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ManifestError(f"expected a part below {self.parts}; found part {self.part}")
        own = {tensor.name: tensor for tensor in self.tensors if not tensor.alias_of}
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ManifestError("expected distinct tensor names; found a name twice")
        end = 0
        for tensor in sorted(own.values(), key=lambda tensor: tensor.offset):
            if tensor.nbytes != TensorSpec(tensor.name, tensor.dtype, tensor.shape).nbytes:
                raise ManifestError(
                    f"{tensor.name}: expected the size of {tensor.dtype} {list(tensor.shape)}; found {tensor.nbytes} bytes"
                )
            if tensor.offset < end or tensor.offset % ALIGNMENT:
                raise ManifestError(f"{tensor.name}: expected an aligned offset from {end} on; found {tensor.offset}")
            end = tensor.offset + tensor.nbytes
        if end != self.nbytes:
            raise ManifestError(f"expected a part of {end} bytes, where its tensors end; found {self.nbytes}")
        for tensor in self.tensors:
            if tensor.alias_of:
                target = own.get(tensor.alias_of)
                if target is None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                    raise ManifestError(
                        f"{tensor.name}: expected a tensor {tensor.alias_of} of the same dtype and shape; found none"
                    )

    @property
    def sealed(self) -> bool:
        """Whether every tensor has a digest."""
        return all(tensor.digest is not None for tensor in self.tensors)

    def stamped(self, run_id: str, term: int, version: int) -> "Manifest":
        """The same layout for another version, digests unknown."""
        tensors = tuple(tensor if tensor.alias_of else replace(tensor, digest=None) for tensor in self.tensors)
        return replace(self, run_id=run_id, term=term, version=version, tensors=tensors)

    def to_proto(self) -> pb.Manifest:
        """Raises ManifestError when the manifest is not sealed."""
        if not self.sealed:
            raise ManifestError("expected a sealed manifest; found one without digests")
        tensors = [
            pb.TensorEntry(
                name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, nbytes=t.nbytes, digest=t.digest, alias_of=t.alias_of
            )
            for t in self.tensors
        ]
        version = pb.VersionId(run_id=self.run_id, term=self.term, version=self.version)
        return pb.Manifest(id=version, part=self.part, parts=self.parts, tensors=tensors, nbytes=self.nbytes)

    @classmethod
    def from_proto(cls, message: pb.Manifest) -> "Manifest":
        """Raises ManifestError when the message is inconsistent."""
        tensors = tuple(
            Tensor(t.name, t.dtype, tuple(t.shape), t.offset, t.nbytes, t.digest, t.alias_of) for t in message.tensors
        )
        version = message.id
        return cls(version.run_id, version.term, version.version, message.part, message.parts, tensors, message.nbytes)


@dataclass(frozen=True)
class RemotePart:
    """A part of a version on another machine of the learner: its sealed manifest, and host:port of that machine's part server."""

    manifest: Manifest
    address: str


@dataclass(frozen=True)
class ArenaSource:
    """One part of a version in an arena slot. Each worker of the engine maps it."""

    path: str
    nonce: bytes
    slot: int
    generation: int
    manifest: Manifest


def plan_manifest(
    specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None, part: int = 0, parts: int = 1
) -> Manifest:
    """Lays out tensors in the given order, each at a multiple of ALIGNMENT bytes.

    Args:
        specs: every tensor of the part with its own bytes.
        aliases: another name -> the tensor whose bytes it shares (tied embeddings).

    Returns:
        The layout, without run, term and version: see `stamped`.

    Raises:
        ManifestError: a duplicate name, an unknown dtype, or an alias without a target.
    """
    tensors: dict[str, Tensor] = {}
    end = 0
    for spec in specs:
        if spec.name in tensors:
            raise ManifestError(f"expected distinct tensor names; found {spec.name} twice")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        tensors[spec.name] = Tensor(spec.name, spec.dtype, spec.shape, offset, spec.nbytes)
        end = offset + spec.nbytes
    own = dict(tensors)
    for name, target in (aliases or {}).items():
        if target not in own:
            raise ManifestError(f"alias {name}: expected a tensor {target}; found none")
        if name in tensors:
            raise ManifestError(f"alias {name}: expected no tensor of that name; found one")
        tensors[name] = Tensor(name, own[target].dtype, own[target].shape, 0, 0, 0, alias_of=target)
    return Manifest("", 0, 0, part, parts, tuple(tensors.values()), end)


def tensor_views(manifest: Manifest, buffer: memoryview) -> dict[str, np.ndarray]:
    """Every tensor of the manifest as a numpy view of the slot's data, aliases resolved, without copies.

    The views are writable when the buffer is. See NUMPY_DTYPES for dtypes that numpy lacks.

    Raises:
        ManifestError: the buffer is shorter than the part.
    """
    if manifest.nbytes > buffer.nbytes:
        raise ManifestError(f"expected a slot of {manifest.nbytes} bytes; found {buffer.nbytes}")
    views = {
        tensor.name: np.frombuffer(
            buffer, NUMPY_DTYPES[tensor.dtype], count=math.prod(tensor.shape), offset=tensor.offset
        ).reshape(tensor.shape)
        for tensor in manifest.tensors
        if not tensor.alias_of
    }
    return {tensor.name: views[tensor.alias_of or tensor.name] for tensor in manifest.tensors}


def _numpy_dtype(spec: TensorSpec) -> np.dtype:
    try:
        return NUMPY_DTYPES[spec.dtype]
    except KeyError:
        raise ManifestError(f"{spec.name}: expected one of the dtypes {', '.join(NUMPY_DTYPES)}; found {spec.dtype!r}") from None


def changed_tensors(before: Manifest | None, after: Manifest) -> int:
    """The number of tensors in `after` whose bytes differ from `before`; all of them when `before` is None."""
    old = {} if before is None else {tensor.name: tensor.digest for tensor in before.tensors}
    return sum(old.get(tensor.name) != tensor.digest for tensor in after.tensors if not tensor.alias_of)
