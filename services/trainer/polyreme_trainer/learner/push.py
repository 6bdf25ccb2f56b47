"""One replica's way to a version: probe, stage, commit. Every call has a deadline; a failure has one of four meanings.

Kept here: a call's error is a verdict on the replica (SwapError, CannotMapError), on the way to it (UnreachableError) or on this
learner (StaleTermError), never a bare gRPC error.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from polyreme import rpc
from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config import SecurityConfig
from polyreme.errors import StaleTermError
from polyreme.registry import Lease

PROBE_SECONDS = 10.0
STAGE_SECONDS = 30.0
COMMIT_SECONDS = 60.0  # an engine step in progress ends first
SLOWEST_BYTES_PER_SECOND = 100e6  # a version's bytes widen the deadlines of staging and committing at this rate


class SwapError(Exception):
    """The replica answered that it could not take the version, or did not answer in time."""


class CannotMapError(SwapError):
    """The replica cannot map the arena: it runs on another host, or in a container with a /dev/shm of its own."""


class UnreachableError(Exception):
    """No connection to the replica."""


@dataclass(frozen=True)
class Version:
    """A complete version in an arena slot."""

    manifest: pb.Manifest
    slot: int
    generation: int

    @property
    def number(self) -> int:
        return int(self.manifest.id.version)


class Link:
    """The connection to one replica's WeightsService.

    Args:
        lease: where it is.
        arena_path, nonce: the arena to offer it.
        security: of the replica's ports.
    """

    def __init__(self, lease: Lease, arena_path: str, nonce: bytes, security: SecurityConfig | None = None) -> None:
        self._security = security
        self._address, self._arena_path, self._nonce = lease.address, arena_path, nonce
        self._channel: grpc.aio.Channel | None = None
        self._mapped = False

    async def push(self, version: Version) -> pb.CommitResponse:
        """Moves the replica to `version`.

        Raises:
            SwapError, CannotMapError, UnreachableError: see there. The replica serves what it served before, or nothing.
            StaleTermError: the replica knows a newer learner.
        """
        channel = self._channel = self._channel or rpc.connect(self._address, self._security)
        stub = pb_grpc.WeightsServiceStub(channel)
        identity, size = version.manifest.id, version.manifest.nbytes / SLOWEST_BYTES_PER_SECOND
        try:
            if not self._mapped:
                probe = pb.ProbeRequest(
                    run_id=identity.run_id, term=identity.term, arena_path=self._arena_path, nonce=self._nonce
                )
                answer = await _call(stub.Probe, probe, PROBE_SECONDS)
                if not answer.can_map:
                    raise CannotMapError(answer.reason)
                self._mapped = True
            stage = pb.StageArenaRequest(
                manifest=version.manifest, arena_path=self._arena_path, slot=version.slot, generation=version.generation
            )
            await _call(stub.StageArena, stage, STAGE_SECONDS + size)
            committed: pb.CommitResponse = await _call(stub.Commit, pb.CommitRequest(id=identity), COMMIT_SECONDS + size)
        except UnreachableError:
            await self.close()  # a fresh channel does not inherit this one's reconnect backoff
            raise
        if committed.version != identity.version:
            raise SwapError(f"it committed version {committed.version} when asked for {identity.version}")
        return committed

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


async def _call(method: Callable[..., Awaitable[Any]], request: Any, seconds: float) -> Any:
    try:
        return await method(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        code, text = error.code(), f"{error.code().name}: {error.details()}"
        if code == grpc.StatusCode.ABORTED:
            raise StaleTermError(
                "this learner to hold the learner's term", text, "Another learner has taken over; this one stops."
            ) from None
        if code == grpc.StatusCode.UNAVAILABLE:
            raise UnreachableError(text) from None
        raise (CannotMapError if code == grpc.StatusCode.NOT_FOUND else SwapError)(text) from None
