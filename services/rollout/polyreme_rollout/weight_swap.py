"""A replica's change of policy: stage and verify the parts of a version, then commit them all at once or roll back.

Invariant:
- The replica serves a whole version with verified digests, or nothing. A failed swap restores the previous version; when that fails
  too, the replica serves nothing until a later version is committed.
- A call with an older learner term than the newest one seen changes nothing.
- Nothing is sampled while the policy changes, and each running request records the token at which it changed.
- Between `at_rest` and the next commit or `go_on`, nothing is sampled and no request is accepted. Neither continues sampling while the
  devices may not be used.
- A version takes requests, and the tokens that it samples are delivered, only after its canary has passed. A replica whose canary fails
  serves nothing until a later swap passes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from polyreme.errors import ConfigError
from polyreme.weights.arena import ArenaError
from polyreme.weights.assembly import RangeError
from polyreme.weights.canary import Canary, CanaryError
from polyreme.weights.delta import DeltaError, DeltaManifest
from polyreme.weights.digest import DigestError, verify
from polyreme.weights.manifest import Manifest, ManifestError
from polyreme.weights.sparse import FrameError
from polyreme_rollout.arena_cache import ArenaCache
from polyreme_rollout.engine.protocol import ArenaSource, EngineDeadError, InferenceEngine, LoadError, LoadResult
from polyreme_rollout.incoming import Incoming
from polyreme_rollout.outgoing import OutgoingParts
from polyreme_rollout.staged_parts import Refusal, StagedParts, VersionId
from polyreme_rollout.weight_receiver import BaseError, SupersededError, WeightReceiver

FAILURES_TO_QUARANTINE = 3
CANARY_TIMEOUT = 10.0  # a saturated engine answers when its first request ends

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """The version in the engine's model, and the location of its parts."""

    id: VersionId
    sources: tuple[ArenaSource, ...]


@dataclass(frozen=True)
class Committed:
    """`stall_seconds`: how long generation was paused; `reload_seconds`: the load of the slowest worker.

    `canary_difference`: see `Canary.check`; None when there was no canary, or no place in the engine for it.
    """

    version: int
    stall_seconds: float
    reload_seconds: float
    canary_difference: float | None = None


class WeightSwapper:
    """Stages, commits and restores versions. Runs on one event loop.

    Args:
        run_id: the run whose versions are accepted.
        engine: holds the weights.
        learner_term: returns the learner's term as last seen in Redis.
        on_swap: called while paused, with the new version and the number of tokens that each unfinished request has sampled.
        on_lost: called when no version could be restored, so running requests cannot continue.
    """

    def __init__(
        self,
        run_id: str,
        engine: InferenceEngine,
        learner_term: Callable[[], int],
        on_swap: Callable[[int, Mapping[str, int]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._run_id, self._engine, self._learner_term = run_id, engine, learner_term
        self._on_swap, self._on_lost = on_swap, on_lost
        self._arenas, self._staging = ArenaCache(), StagedParts(engine.weight_names)
        self._loading: tuple[ArenaSource, ...] = ()
        self._receiver = WeightReceiver(self._in_use, self._staging.forget)
        self._lock = asyncio.Lock()
        self._term = 0
        self._swaps = 0
        self._failures = 0
        self._intact = True
        """Whether the engine has the weights of `served`, unless it has dropped them while it slept."""
        self.may_use_devices: Callable[[], bool] = lambda: True
        """Whether the engine may sample. A colocated replica sets it: see `device_turns`."""
        self.served: Served | None = None
        self.steady = asyncio.Event()
        """Set while no swap is running: a request that is submitted then samples from `version` under `salt`."""
        self.steady.set()

    @property
    def version(self) -> int | None:
        return self.served.id.version if self.served else None

    @property
    def salt(self) -> str:
        """Requests share cached prefixes only under the same salt, and each set of weights has its own."""
        served = f"{self.served.id.term}.{self.served.id.version}" if self.served else "none"
        return f"{served}.{self._swaps}"

    async def steady_salt(self) -> str:
        """The salt of a request that is submitted now. Waits for the end of a swap."""
        await self.steady.wait()
        return self.salt

    async def steady_version(self) -> int | None:
        """The version that is served, None without one. Waits for the end of a swap."""
        await self.steady.wait()
        return self.version

    @property
    def outgoing(self) -> OutgoingParts:
        """What other replicas may fetch from this one."""
        return self._receiver.outgoing

    @property
    def failures(self) -> int:
        """Consecutive failed swaps."""
        return self._failures

    @property
    def quarantined(self) -> bool:
        return self._failures >= FAILURES_TO_QUARANTINE

    def probe(self, run_id: str, term: int, path: str, nonce: bytes) -> None:
        """Checks that the arena at `path` can be mapped and has this nonce. Raises Refusal: NOT_FOUND, ABORTED, INVALID_ARGUMENT."""
        self.admit(run_id, term)
        try:
            self._arenas.with_nonce(path, nonce)
        except ArenaError as error:
            raise Refusal("NOT_FOUND", str(error)) from None

    async def stage(self, manifest: Manifest, path: str, slot: int, generation: int) -> float:
        """Verifies one part in place while generation continues. Returns the duration in seconds.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT, FAILED_PRECONDITION; NOT_FOUND: the arena cannot be mapped; DATA_LOSS: its
                bytes do not match the manifest, or were overwritten meanwhile.
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
        self._staging.put(ArenaSource(path, arena.nonce, slot, generation, manifest))
        return time.perf_counter() - started

    @asynccontextmanager
    async def receive(self, content: Manifest | DeltaManifest) -> AsyncIterator[Incoming]:
        """Receives one part, or a delta that leads to it, by stream: the block adds the bytes, and the part is staged at its end.
        Generation continues.

        Raises:
            Refusal: ABORTED; FAILED_PRECONDITION, also when the base of a delta is not here; RESOURCE_EXHAUSTED: no room; DATA_LOSS: the
                bytes do not match the manifest; INVALID_ARGUMENT: bytes out of order, missing, or beyond the part; CANCELLED: a newer
                stream has started.
        """
        stream: AbstractAsyncContextManager[Incoming]
        if isinstance(content, DeltaManifest):
            manifest, stream = content.manifest, self._receiver.receive_delta(content)
        else:
            manifest, stream = content, self._receiver.receive(content)
        self.admit(manifest.run_id, manifest.term)
        try:
            async with stream as incoming:
                yield incoming
                source = await incoming.finish()
                if source is None:
                    raise RangeError(f"expected {incoming.nbytes} bytes; the stream ended after {incoming.position}")
                self.admit(manifest.run_id, manifest.term)  # a newer learner may have registered meanwhile
                self._staging.put(source)
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

    def _in_use(self) -> set[bytes]:
        """The nonces of the served version's arenas, and of those that the engine may be reading."""
        return {source.nonce for source in (*self._loading, *(self.served.sources if self.served else ()))}

    async def commit(self, run_id: str, id: VersionId, canary: Canary | None = None) -> Committed:
        """Swaps the staged version in. Completes even when the caller disconnects.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT; FAILED_PRECONDITION, also when the devices may not be used; INTERNAL: the swap or its
                canary failed; the message names the version that is served now.
            EngineDeadError: the engine has died.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(run_id, id, canary)))

    async def _commit(self, run_id: str, id: VersionId, canary: Canary | None) -> Committed:
        async with self._lock:
            self.admit(run_id, id.term)
            if self.served and self.served.id == id:
                return Committed(id.version, 0.0, 0.0)
            if self.served and self.served.id.term == id.term and self.served.id.version > id.version:
                raise Refusal(
                    "FAILED_PRECONDITION",
                    f"expected a version after {self.served.id.version}, which is served; found {id.version}",
                )
            self._check_devices()
            sources = self._staging.take(id)
            self._loading = (*sources, *(self.served.sources if self.served else ()))
            self.steady.clear()
            try:
                committed = await self._swap(Served(id, sources), canary)
            except EngineDeadError:
                self._lose()
                raise
            finally:
                self._loading = ()
        logger.info("serving version %d of term %d (paused %.1f ms)", id.version, id.term, committed.stall_seconds * 1e3)
        return committed

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """No swap runs in the block, nothing is sampled, and new requests wait. After it, a commit or `go_on` continues sampling.

        Raises EngineDeadError.
        """
        async with self._lock:
            self.steady.clear()
            await self._engine.pause()
            yield

    async def go_on(self, weights: bool) -> None:
        """Continues sampling after `at_rest` with the served version, unless a commit has continued it or the devices may not be used.

        Args:
            weights: whether the engine has kept them. If not, it loads the served version again.

        Raises:
            EngineDeadError: the engine has died.
        """
        async with self._lock:
            if self.steady.is_set() or not self.may_use_devices():
                return
            if (weights and self._intact) or self.served is None:
                await self._engine.resume()
                self.steady.set()
                return
            try:
                self._intact = False
                loaded = await self._engine.load(self.served.sources)
                if self.may_use_devices():
                    await self._resume(self.served, loaded)
                    self.steady.set()
            except LoadError as error:
                logger.error("version %d could not be loaded again; nothing is served: %s", self.served.id.version, error)
                self._lose()

    async def _swap(self, new: Served, canary: Canary | None) -> Committed:
        """Pauses, loads, resumes, and asks the canary. Raises Refusal(INTERNAL), EngineDeadError."""
        started = time.perf_counter()
        await self._engine.pause()
        try:
            self._intact = False
            loaded = await self._engine.load(new.sources)
        except LoadError as error:
            raise Refusal("INTERNAL", await self._fall_back(new.id, error)) from None
        self._check_devices()  # the grant may have ended meanwhile; `go_on` then loads the served version again
        self._staging.drop()
        await self._resume(new, loaded)
        stall = time.perf_counter() - started
        try:
            difference = await self._ask_canary(canary) if canary else None
        except CanaryError as error:
            self._failures += 1
            self._lose()
            text = f"version {new.id.version} failed its canary: {error}; nothing is served{self._quarantine_notice()}"
            logger.error("%s", text)
            raise Refusal("INTERNAL", text) from None
        self._failures = 0
        self._begin(new)
        return Committed(new.id.version, stall, loaded.seconds, difference)

    async def _ask_canary(self, canary: Canary) -> float | None:
        """Raises CanaryError. None: every place of the engine stayed taken, by requests that go on meanwhile."""
        try:
            async with asyncio.timeout(CANARY_TIMEOUT):
                return canary.check(await self._engine.logprobs(canary.ids, f"canary.{self.salt}"))
        except TimeoutError:
            logger.warning("the engine had no place for the canary within %g s; the version is served without it", CANARY_TIMEOUT)
            return None

    async def _fall_back(self, id: VersionId, error: LoadError) -> str:
        """Restores the previous version after a failed load, or serves nothing. Returns the message for the learner."""
        self._failures += 1
        self._staging.drop()
        before, self.served = self.served, None
        outcome = "nothing is served"
        if before:
            try:
                loaded = await self._engine.load(before.sources)
                self.served = before
                self._check_devices()
                await self._resume(before, loaded)
                self._begin(before)
                outcome = f"version {before.id.version} is served again"
            except LoadError as again:
                outcome += f" because version {before.id.version} could not be restored: {again}"
        if self.served is None:
            self._lose()
        text = f"version {id.version} could not be loaded: {error}; {outcome}{self._quarantine_notice()}"
        logger.error("%s", text)
        return text

    def _quarantine_notice(self) -> str:
        if not self.quarantined:
            return ""
        return f"; quarantined after {self._failures} consecutive failed swaps: restart this replica"

    async def _resume(self, served: Served, loaded: LoadResult) -> None:
        self._intact = True
        self._swaps += 1
        self._on_swap(served.id.version, loaded.sampled)
        await self._engine.resume()

    def _check_devices(self) -> None:
        """Raises Refusal(FAILED_PRECONDITION) when the devices may not be used."""
        if not self.may_use_devices():
            raise Refusal("FAILED_PRECONDITION", "expected the right to use the devices; found that it has ended")

    def _begin(self, served: Served) -> None:
        self.served = served
        self.steady.set()

    def _lose(self) -> None:
        self.served = None
        self._on_lost()
        self.steady.set()  # waiting calls then find that nothing is served

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
        if self.quarantined:
            raise Refusal(
                "FAILED_PRECONDITION", f"quarantined after {self._failures} consecutive failed swaps: restart this replica"
            )
