"""The parts of a version that wait for its commit, and the refusal of a weights call. Pure.

Invariant: `take` returns all parts of one version whose tensors are exactly those of the model, or refuses.
"""

from dataclasses import dataclass
from typing import Literal

from polyreme.weights.manifest import ArenaSource

Code = Literal[
    "ABORTED",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
]


class Refusal(Exception):
    """A refused or failed weights call; `code` is the name of a gRPC status."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class VersionId:
    term: int
    version: int


class StagedParts:
    """The verified parts of the next version. Pure.

    Args:
        weight_names: see `InferenceEngine.weight_names`.
    """

    def __init__(self, weight_names: frozenset[str]) -> None:
        self._weight_names = weight_names
        self._id: VersionId | None = None
        self._parts: dict[int, ArenaSource] = {}

    def put(self, source: ArenaSource) -> None:
        """Stores a verified part. A part of another version replaces all stored parts."""
        manifest = source.manifest
        id = VersionId(manifest.term, manifest.version)
        if id != self._id or any(part.manifest.parts != manifest.parts for part in self._parts.values()):
            self._id, self._parts = id, {}
        self._parts[manifest.part] = source

    @property
    def complete_version(self) -> int:
        """The version of which all parts are stored; -1: none."""
        complete = any(len(self._parts) == source.manifest.parts for source in self._parts.values())
        return self._id.version if self._id and complete else -1

    def take(self, id: VersionId) -> tuple[ArenaSource, ...]:
        """The version's parts, in order. Raises Refusal(FAILED_PRECONDITION) when they are incomplete or do not fit the model."""
        if id != self._id:
            found = f"version {self._id.version} of term {self._id.term}" if self._id else "nothing"
            raise Refusal("FAILED_PRECONDITION", f"expected version {id.version} of term {id.term} to be staged; found {found}")
        parts = next(iter(self._parts.values())).manifest.parts
        missing_parts = sorted(set(range(parts)) - set(self._parts))
        if missing_parts:
            raise Refusal(
                "FAILED_PRECONDITION", f"expected {parts} parts of version {id.version}; parts {missing_parts} are missing"
            )
        tensors = [tensor for source in self._parts.values() for tensor in source.manifest.tensors]
        missing = self._weight_names - {tensor.name for tensor in tensors}
        unknown = {tensor.name for tensor in tensors if not tensor.alias_of} - self._weight_names
        if missing or unknown:
            raise Refusal(
                "FAILED_PRECONDITION",
                f"expected the tensors of this replica's model in version {id.version}; missing {_some(missing)}, unknown"
                f" {_some(unknown)}",
            )
        return tuple(self._parts[part] for part in range(parts))

    def drop(self) -> None:
        self._id, self._parts = None, {}

    def forget(self, nonce: bytes) -> None:
        """Drops all parts when one of them is in this arena."""
        if any(source.nonce == nonce for source in self._parts.values()):
            self.drop()


def _some(names: set[str] | frozenset[str]) -> str:
    few = ", ".join(sorted(names)[:3]) or "none"
    return few if len(names) <= 3 else f"{few} and {len(names) - 3} more"
