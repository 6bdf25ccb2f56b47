"""A part of versions that another machine of the learner holds. Its part server computes the deltas; replicas fetch from there.

Invariant:
- The slots of two versions count as being compared until the machine has answered for the delta between them.
- A delta is offered only if it leads from the base's manifest to the version's, both as the machine has sealed them.
- A machine that does not answer in time is not asked for deltas for a while, and its part goes whole.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.net import rpc
from polyreme.weights.delta import DeltaManifest
from polyreme.weights.manifest import ManifestError
from polyreme_trainer.weight_sync.part_source import Offer
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import RelayError, ReplicaClient, Sent, SwapError, UnreachableError
from polyreme_trainer.weight_sync.version import Version

SILENT_SECONDS = 300.0  # without requests after one that was not answered

logger = logging.getLogger(__name__)

_Found = tuple[DeltaManifest, float]


class MachinePart:
    """A `PartSource`.

    Args:
        number: the part's number, 1 or more.
        on_slots: called with the slots that the machine compares, when they change.
        limits: of pushes.
        security: of the machine's port.
    """

    def __init__(
        self, number: int, on_slots: Callable[[set[int]], None], limits: PushLimits, security: SecurityConfig | None = None
    ) -> None:
        self._number, self._on_slots, self._limits, self._security = number, on_slots, limits, security
        self._newest: Version | None = None
        self._answers: dict[tuple[int, int], asyncio.Task[_Found | None]] = {}  # by base and version
        self._running: set[asyncio.Task[_Found | None]] = set()
        self._compared: list[int] = []
        self._ask_again = 0.0

    def publish(self, version: Version, wanted: bool) -> None:
        before, self._newest = self._newest, version
        self._answers = {pair: task for pair, task in self._answers.items() if before and pair[1] == before.number}
        if wanted and before is not None:
            self._answer(before, version)

    async def offer(self, base: Version | None, version: Version) -> Offer:
        part = version.parts[self._number - 1]
        manifest, found = part.manifest.to_proto(), None
        if base is not None:
            answer = self._answer(base, version)
            await asyncio.wait({answer})  # other waiters keep it when this one is cancelled
            found = answer.result()
        delta, seconds = found or (None, 0.0)

        async def send(client: ReplicaClient) -> Sent:
            try:
                return await client.relay(manifest, delta, part.address)
            except RelayError as error:
                if delta is not None:
                    raise SwapError(str(error)) from None
                raise UnreachableError(f"part {self._number} of version {version.number}: {error}") from None

        return Offer(manifest, send, delta, seconds)

    def close(self) -> None:
        for task in self._running:
            task.cancel()

    def _answer(self, base: Version, version: Version) -> "asyncio.Task[_Found | None]":
        """The one request for the delta between two versions."""
        pair = base.number, version.number
        if pair not in self._answers:
            task = self._answers[pair] = asyncio.create_task(self._ask(base, version))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return self._answers[pair]

    async def _ask(self, base: Version, version: Version) -> _Found | None:
        if time.monotonic() < self._ask_again:
            return None
        slots = [base.slot, version.slot]
        self._compare([*self._compared, *slots])
        try:
            return await self._find(base, version)
        finally:
            rest = list(self._compared)
            for slot in slots:
                rest.remove(slot)
            self._compare(rest)

    async def _find(self, base: Version, version: Version) -> _Found | None:
        part, was = version.parts[self._number - 1], base.parts[self._number - 1].manifest
        title = f"no delta of part {self._number} from version {base.number} to {version.number}"
        request = pb.FindDeltaRequest(
            id=version.manifest.id, part=self._number, base=pb.VersionId(run_id=was.run_id, term=was.term, version=was.version)
        )
        try:
            async with rpc.connect(part.address, self._security) as channel:
                seconds = self._limits.find_delta + self._limits.memory_seconds(part.manifest.nbytes)
                answer: pb.FindDeltaResponse = await pb_grpc.PartServiceStub(channel).FindDelta(request, timeout=seconds)
            delta = DeltaManifest.from_proto(answer.delta)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                self._ask_again = time.monotonic() + SILENT_SECONDS
            logger.info("%s: %s: %s: %s", title, part.address, error.code().name, error.details())
            return None
        except ManifestError as error:
            logger.warning("%s: %s: %s", title, part.address, error)
            return None
        if delta.manifest != part.manifest or delta.base != was:
            logger.warning("%s: %s answered with one between other bytes", title, part.address)
            return None
        return delta, answer.encode_seconds

    def _compare(self, slots: list[int]) -> None:
        self._compared = slots
        self._on_slots(set(slots))
