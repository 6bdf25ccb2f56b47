"""What a version's bytes mean: names, shapes and places. Pure.

Kept here: a manifest that exists is consistent. Names are unique, every tensor lies inside the part and on an aligned
offset, no two overlap, an alias names a tensor of the same dtype and shape that has bytes of its own.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polyreme.api.v1 import weights_pb2 as pb

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs

# safetensors dtype names, and the numpy dtype of their views. What numpy lacks (BF16, F8) is seen as unsigned words of its size.
NUMPY_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"},
        **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"},
    }.items()
}


class ManifestError(ValueError):
    """A manifest contradicts itself, or what it is used on."""


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
    """A tensor's place in a slot: `nbytes` bytes from `offset` on, or, with `alias_of`, the bytes of that other tensor.

    `digest` is the xxh3_64 of the bytes, or None while they are still being written. An alias has offset, nbytes and digest 0.
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

    `nbytes` is the part's size: where its last tensor ends. Raises ManifestError when the tensors contradict each other.
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
            raise ManifestError(f"part {self.part} of {self.parts}")
        own = {tensor.name: tensor for tensor in self.tensors if not tensor.alias_of}
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ManifestError("a tensor name occurs twice")
        end = 0
        for tensor in sorted(own.values(), key=lambda tensor: tensor.offset):
            if tensor.nbytes != TensorSpec(tensor.name, tensor.dtype, tensor.shape).nbytes:
                raise ManifestError(f"{tensor.name}: {tensor.nbytes} bytes do not hold {tensor.dtype} {list(tensor.shape)}")
            if tensor.offset < end or tensor.offset % ALIGNMENT:
                raise ManifestError(f"{tensor.name}: offset {tensor.offset} overlaps another tensor or is not aligned")
            end = tensor.offset + tensor.nbytes
        if end != self.nbytes:
            raise ManifestError(f"tensors end at {end}, the part at {self.nbytes}")
        for tensor in self.tensors:
            if tensor.alias_of:
                target = own.get(tensor.alias_of)
                if target is None or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
                    raise ManifestError(f"{tensor.name}: no tensor {tensor.alias_of} of the same dtype and shape to stand for it")

    @property
    def sealed(self) -> bool:
        """Whether every tensor's digest is known."""
        return all(tensor.digest is not None for tensor in self.tensors)

    def stamped(self, run_id: str, term: int, version: int) -> "Manifest":
        """The same layout for another version, digests unknown."""
        tensors = tuple(tensor if tensor.alias_of else replace(tensor, digest=None) for tensor in self.tensors)
        return replace(self, run_id=run_id, term=term, version=version, tensors=tensors)

    def to_proto(self) -> pb.Manifest:
        """Raises ManifestError when the manifest is not sealed."""
        if not self.sealed:
            raise ManifestError("a manifest travels only with its digests")
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
        """Raises ManifestError when the message contradicts itself."""
        tensors = tuple(
            Tensor(t.name, t.dtype, tuple(t.shape), t.offset, t.nbytes, t.digest, t.alias_of) for t in message.tensors
        )
        version = message.id
        return cls(version.run_id, version.term, version.version, message.part, message.parts, tensors, message.nbytes)


def plan_manifest(
    specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None, part: int = 0, parts: int = 1
) -> Manifest:
    """Places tensors one after the other, in the order given, each on a multiple of ALIGNMENT bytes.

    Args:
        specs: every tensor of the part that has bytes of its own.
        aliases: further name -> the spec whose bytes it shares (tied embeddings).

    Returns:
        The layout; `stamped` gives it a run, a term and a version.

    Raises:
        ManifestError: a name occurs twice, a dtype is not known, an alias has no target.
    """
    tensors: dict[str, Tensor] = {}
    end = 0
    for spec in specs:
        if spec.name in tensors:
            raise ManifestError(f"tensor {spec.name} is listed twice")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        tensors[spec.name] = Tensor(spec.name, spec.dtype, spec.shape, offset, spec.nbytes)
        end = offset + spec.nbytes
    own = dict(tensors)
    for name, target in (aliases or {}).items():
        if target not in own:
            raise ManifestError(f"alias {name}: there is no tensor {target}")
        if name in tensors:
            raise ManifestError(f"alias {name} is listed as a tensor too")
        tensors[name] = Tensor(name, own[target].dtype, own[target].shape, 0, 0, 0, alias_of=target)
    return Manifest("", 0, 0, part, parts, tuple(tensors.values()), end)


def tensor_views(manifest: Manifest, buffer: memoryview) -> dict[str, np.ndarray]:
    """Every tensor of the manifest as a numpy view of the slot's data, aliases resolved; nothing is copied.

    The views are writable when the buffer is. A dtype that numpy lacks shows as its words: see NUMPY_DTYPES.

    Raises:
        ManifestError: the buffer is shorter than the part.
    """
    if manifest.nbytes > buffer.nbytes:
        raise ManifestError(f"the part has {manifest.nbytes} bytes, the slot {buffer.nbytes}")
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
        raise ManifestError(f"{spec.name}: unknown dtype {spec.dtype!r}; known are {', '.join(NUMPY_DTYPES)}") from None


def changed_tensors(before: Manifest | None, after: Manifest) -> int:
    """How many tensors of `after` have other bytes than in `before`; all of them when there is no version before."""
    old = {} if before is None else {tensor.name: tensor.digest for tensor in before.tensors}
    return sum(old.get(tensor.name) != tensor.digest for tensor in after.tensors if not tensor.alias_of)
