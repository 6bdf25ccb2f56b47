"""The part of the versions that the publisher's own machine holds: deltas are computed from its arena, and bytes are streamed from it."""

from polyreme_trainer.weight_sync.deltas import Deltas
from polyreme_trainer.weight_sync.part_source import Offer
from polyreme_trainer.weight_sync.version import Version


class LocalPart:
    """A `PartSource`. Args: deltas: of the arena."""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas

    def publish(self, version: Version, wanted: bool) -> None:
        self._deltas.publish(version, wanted)

    async def offer(self, base: Version | None, version: Version) -> Offer:
        encoded = await self._deltas.between(base.number, version.number) if base else None
        if encoded is None:
            return Offer(version.manifest, lambda client: client.stream(version))
        delta = encoded.delta
        return Offer(version.manifest, lambda client: client.stream_delta(delta), delta.manifest, encoded.seconds)

    def close(self) -> None:
        self._deltas.close()
