"""A complete version, as the learner's machines hold it. Pure.

Invariant: all parts of a version are in the same slot, each in the arena of its own machine.
"""

from dataclasses import dataclass

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights.manifest import RemotePart


@dataclass(frozen=True)
class Version:
    """A version and its canary, if any. `manifest`, `generation`: of this machine's part; `parts`: those on other machines."""

    manifest: pb.Manifest
    slot: int
    generation: int
    canary: pb.Canary | None = None
    parts: tuple[RemotePart, ...] = ()

    @property
    def number(self) -> int:
        return int(self.manifest.id.version)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The bytes of each part, in order."""
        return (int(self.manifest.nbytes), *(part.manifest.nbytes for part in self.parts))

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.part_sizes)
