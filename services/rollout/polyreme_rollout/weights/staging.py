"""Stages the parts of a version: maps them in the trainer's arena or receives them, verifies them, and keeps them for the commit.

Invariant:
- Every part that `take` returns has verified digests. Received bytes never overwrite bytes that the engine serves or loads.
- A call with an older learner term than the newest one seen changes nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from polyreme.errors import ConfigError
from polyreme.weights.arena import ArenaError
from polyreme.weights.assembly import RangeError
from polyreme.weights.delta import DeltaError, DeltaManifest
from polyreme.weights.digest import DigestError, verify
from polyreme.weights.manifest import ArenaSource, Manifest, ManifestError
from polyreme.weights.sparse import FrameError
from polyreme_rollout.engine.arena_cache import ArenaCache
from polyreme_rollout.weights.incoming import Incoming
from polyreme_rollout.weights.outgoing import OutgoingParts
from polyreme_rollout.weights.staged_parts import Refusal, StagedParts, VersionId
from polyreme_rollout.weights.weight_receiver import BaseError, SupersededError, WeightReceiver


class Staging:
    """The parts that are staged, and the checks of every call about weights. Runs on one event loop.

    Args:
        run_id: the run whose versions are accepted.
        weight_names: see `InferenceEngine.weight_names`.
        learner_term: returns the learner's term as last seen in Redis.
        quarantine_reason: returns why every call is refused; empty when the replica is not quarantined.
        in_use: returns the nonces of the served version's arenas, and of those that the engine may be reading.
    """

    def __init__(
        self,
        run_id: str,
        weight_names: frozenset[str],
        learner_term: Callable[[], int],
        quarantine_reason: Callable[[], str],
        in_use: Callable[[], set[bytes]],
    ) -> None:
        self._run_id, self._learner_term, self._quarantine_reason = run_id, learner_term, quarantine_reason
        self._arenas, self._staged = ArenaCache(), StagedParts(weight_names)
        self.receiver = WeightReceiver(in_use, self._staged.forget)
        self._term = 0

    @property
    def outgoing(self) -> OutgoingParts:
        """The parts that other replicas may fetch from this one."""
        return self.receiver.outgoing

    def probe(self, run_id: str, term: int, path: str, nonce: bytes) -> None:
        """Checks that the arena `path` can be mapped and has this nonce. Raises Refusal: NOT_FOUND, ABORTED, INVALID_ARGUMENT."""
        self.admit(run_id, term)
        try:
            self._arenas.with_nonce(path, nonce)
        except ArenaError as error:
            raise Refusal("NOT_FOUND", str(error)) from None

    async def stage(self, manifest: Manifest, path: str, slot: int, generation: int) -> float:
        """Verifies one part in place while generation continues. Returns the duration in seconds.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT, FAILED_PRECONDITION; NOT_FOUND: the arena cannot be mapped; DATA_LOSS: its
                bytes do not match the manifest, or were overwritten during the verification.
        """
        self.admit(manifest.run_id, manifest.term)
        try:
            arena = self._arenas.at(path)
        except ArenaError as error:
            raise Refusal("NOT_FOUND", str(error)) from None
        started = time.perf_counter()
        try:
            arena.check(slot, generation)
            await asyncio.to_thread(verify, manifest, arena.slot_view(slot))
            arena.check(slot, generation)
        except (ArenaError, DigestError, ManifestError) as error:
            raise Refusal("DATA_LOSS", str(error)) from None
        self.admit(manifest.run_id, manifest.term)  # a newer learner may have registered meanwhile
        self._staged.put(ArenaSource(path, arena.nonce, slot, generation, manifest))
        return time.perf_counter() - started

    @asynccontextmanager
    async def receive(self, content: Manifest | DeltaManifest) -> AsyncIterator[Incoming]:
        """Receives one part, whole or as a delta, by stream: the block adds the bytes, and the part is staged at its end.
        Generation continues.

        Raises:
            Refusal: ABORTED; FAILED_PRECONDITION, also when the base of a delta is missing; RESOURCE_EXHAUSTED: no room;
                DATA_LOSS: the bytes do not match the manifest; INVALID_ARGUMENT: bytes out of order, missing, or beyond the part;
                CANCELLED: a newer stream has started.
        """
        stream: AbstractAsyncContextManager[Incoming]
        if isinstance(content, DeltaManifest):
            manifest, stream = content.manifest, self.receiver.receive_delta(content)
        else:
            manifest, stream = content, self.receiver.receive(content)
        self.admit(manifest.run_id, manifest.term)
        try:
            async with stream as incoming:
                yield incoming
                source = await incoming.finish()
                if source is None:
                    raise RangeError(f"expected {incoming.nbytes} bytes; the stream ended after {incoming.position}")
                self.admit(manifest.run_id, manifest.term)  # a newer learner may have registered meanwhile
                self._staged.put(source)
        except (RangeError, ManifestError) as error:
            raise Refusal("INVALID_ARGUMENT", str(error)) from None
        except (DigestError, DeltaError, FrameError) as error:
            raise Refusal("DATA_LOSS", str(error)) from None
        except BaseError as error:
            raise Refusal("FAILED_PRECONDITION", str(error)) from None
        except ConfigError as error:
            raise Refusal("RESOURCE_EXHAUSTED", str(error)) from None
        except SupersededError as error:
            raise Refusal("CANCELLED", str(error)) from None

    @property
    def version(self) -> int:
        """The version of which all parts are staged; -1: none."""
        return self._staged.complete_version

    def take(self, id: VersionId) -> tuple[ArenaSource, ...]:
        """The parts of a version that is staged completely. Raises Refusal(FAILED_PRECONDITION)."""
        return self._staged.take(id)

    def drop(self) -> None:
        """Forgets the staged parts."""
        self._staged.drop()

    def admit(self, run_id: str, term: int) -> None:
        """As `check`. Refuses calls of older terms from now on."""
        self.check(run_id, term)
        self._term = term

    def check(self, run_id: str, term: int) -> None:
        """Refuses a call of another run or of an older term, and every call once quarantined. Raises Refusal."""
        if run_id != self._run_id:
            raise Refusal("INVALID_ARGUMENT", f"expected a call of run {self._run_id}; found run {run_id}")
        self._term = max(self._term, self._learner_term())
        if term < self._term:
            raise Refusal("ABORTED", f"expected term {self._term} of the current learner, or newer; found {term}")
        if reason := self._quarantine_reason():
            raise Refusal("FAILED_PRECONDITION", reason)
