"""Where one part of the versions comes from: the interface of the learner's machines to the streams.

Invariant: an offer is whole, or a delta from exactly the asked base. A source that has no delta in time offers the whole part.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights.delta import DeltaManifest
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, Sent
from polyreme_trainer.weight_sync.version import Version


@dataclass(frozen=True)
class Offer:
    """A part of a version, as its machine sends it now.

    Attributes:
        manifest: of the whole part, sealed.
        send: sends content to a replica. Raises as `ReplicaClient.stream`; SwapError also for a delta that cannot be delivered.
        delta: what is sent; None: the whole part, from the version's slot.
        encode_seconds: the computation of the delta.
    """

    manifest: pb.Manifest
    send: Callable[[ReplicaClient], Awaitable[Sent]]
    delta: DeltaManifest | None = None
    encode_seconds: float = 0.0


class PartSource(Protocol):
    """The machine that holds one part of every version. Runs on one event loop."""

    def publish(self, version: Version, wanted: bool) -> None:
        """`version` is the newest. `wanted`: whether a replica receives streams, so that a delta to it may be needed."""

    async def offer(self, base: Version | None, version: Version) -> Offer:
        """What to send to a replica that serves `base`; None: it has no base. Waits for a delta that is being computed."""

    def close(self) -> None:
        """Ends the computation of deltas."""
