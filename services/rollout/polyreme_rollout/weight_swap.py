"""How a replica changes its policy: stage parts, verify them, commit them all at once, or go back.

Kept here:
- What is served is a whole version whose digests were right, or nothing. A failed swap restores the version before; when that
  fails too, the replica serves nothing until a later version is committed.
- A call of an older learner term than any seen changes nothing.
- Nothing is sampled while the policy changes, and requests that were under way learn at which token it did.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from polyreme.errors import ConfigError
from polyreme.weights.arena import ArenaError
from polyreme.weights.assembly import RangeError
from polyreme.weights.digest import DigestError, verify
from polyreme.weights.manifest import Manifest, ManifestError
from polyreme_rollout.arena_cache import ArenaCache
from polyreme_rollout.engine.base import ArenaSource, Engine, EngineDeadError, Loaded, LoadError
from polyreme_rollout.weight_receiver import Incoming, Intake, SupersededError

FAILURES_TO_QUARANTINE = 3

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
]
log = logging.getLogger(__name__)


class Refusal(Exception):
    """A weights call that is not done; `code` is the name of a gRPC status."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class VersionId:
    term: int
    version: int


@dataclass(frozen=True)
class Served:
    """What the engine's model holds, and where it came from."""

    id: VersionId
    sources: tuple[ArenaSource, ...]


@dataclass(frozen=True)
class Committed:
    """`stall_seconds`: how long generation stood still; `reload_seconds`: the slowest worker's load alone."""

    version: int
    stall_seconds: float
    reload_seconds: float


class Staging:
    """The parts of the version that comes next. Pure.

    Args:
        weight_names: what the model is made of: see `Engine.weight_names`.
    """

    def __init__(self, weight_names: frozenset[str]) -> None:
        self._weight_names = weight_names
        self._id: VersionId | None = None
        self._parts: dict[int, ArenaSource] = {}

    def put(self, source: ArenaSource) -> None:
        """Keeps a verified part. A part of another version than the parts so far replaces them all."""
        manifest = source.manifest
        id = VersionId(manifest.term, manifest.version)
        if id != self._id or any(part.manifest.parts != manifest.parts for part in self._parts.values()):
            self._id, self._parts = id, {}
        self._parts[manifest.part] = source

    def take(self, id: VersionId) -> tuple[ArenaSource, ...]:
        """All parts of the version, in order. Raises Refusal(FAILED_PRECONDITION): not complete, or not this model's."""
        if id != self._id:
            found = f"version {self._id.version} of term {self._id.term}" if self._id else "nothing"
            raise Refusal("FAILED_PRECONDITION", f"version {id.version} of term {id.term} is not staged; {found} is")
        parts = next(iter(self._parts.values())).manifest.parts
        missing_parts = sorted(set(range(parts)) - set(self._parts))
        if missing_parts:
            raise Refusal("FAILED_PRECONDITION", f"version {id.version} lacks parts {missing_parts} of {parts}")
        tensors = [tensor for source in self._parts.values() for tensor in source.manifest.tensors]
        missing = self._weight_names - {tensor.name for tensor in tensors}
        unknown = {tensor.name for tensor in tensors if not tensor.alias_of} - self._weight_names
        if missing or unknown:
            raise Refusal(
                "FAILED_PRECONDITION",
                f"version {id.version} is not of this replica's model: missing {_some(missing)}, unknown {_some(unknown)}",
            )
        return tuple(self._parts[part] for part in range(parts))

    def drop(self) -> None:
        self._id, self._parts = None, {}

    def forget(self, nonce: bytes) -> None:
        """Drops everything when a part lies in this arena."""
        if any(source.nonce == nonce for source in self._parts.values()):
            self.drop()


class Swapper:
    """The replica's versions. Everything runs on one event loop.

    Args:
        run_id: whose versions are taken.
        engine: what holds them.
        learner_term: the learner's term as last seen in Redis.
        on_swap: called while paused with the new version and the tokens each unfinished request had sampled before it.
        on_lost: called when no version could be restored: what is under way cannot go on.
    """

    def __init__(
        self,
        run_id: str,
        engine: Engine,
        learner_term: Callable[[], int],
        on_swap: Callable[[int, Mapping[str, int]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._run_id, self._engine, self._learner_term = run_id, engine, learner_term
        self._on_swap, self._on_lost = on_swap, on_lost
        self._arenas, self._staging = ArenaCache(), Staging(engine.weight_names)
        self._loading: tuple[ArenaSource, ...] = ()
        self._intake = Intake(self._in_use, self._staging.forget)
        self._lock = asyncio.Lock()
        self._term = 0
        self._swaps = 0
        self._failures = 0
        self.served: Served | None = None
        self.steady = asyncio.Event()
        """Set while no swap is under way: what is submitted then samples from `version` under `salt`."""
        self.steady.set()

    @property
    def version(self) -> int | None:
        return self.served.id.version if self.served else None

    @property
    def salt(self) -> str:
        """Cached prefixes are shared only between requests of the same salt: no two weights have the same."""
        served = f"{self.served.id.term}.{self.served.id.version}" if self.served else "none"
        return f"{served}.{self._swaps}"

    async def steady_salt(self) -> str:
        """The salt of what is submitted now; waits for the end of a swap."""
        await self.steady.wait()
        return self.salt

    @property
    def failures(self) -> int:
        """Swaps that failed in a row."""
        return self._failures

    @property
    def quarantined(self) -> bool:
        return self._failures >= FAILURES_TO_QUARANTINE

    def probe(self, run_id: str, term: int, path: str, nonce: bytes) -> None:
        """Whether the arena at `path` can be mapped and is the one meant. Raises Refusal: NOT_FOUND, ABORTED, INVALID_ARGUMENT."""
        self._admit(run_id, term)
        try:
            self._arenas.named(path, nonce)
        except ArenaError as error:
            raise Refusal("NOT_FOUND", str(error)) from None

    async def stage(self, manifest: Manifest, path: str, slot: int, generation: int) -> float:
        """Verifies one part where it lies; generation goes on. Returns the seconds that took.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT, FAILED_PRECONDITION; NOT_FOUND: the arena cannot be mapped; DATA_LOSS: its
                bytes are not those of the manifest, or were written anew meanwhile.
        """
        self._admit(manifest.run_id, manifest.term)
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
        self._admit(manifest.run_id, manifest.term)  # a newer learner may have come meanwhile
        self._staging.put(ArenaSource(path, arena.nonce, slot, generation, manifest))
        return time.perf_counter() - started

    @asynccontextmanager
    async def receive(self, manifest: Manifest) -> AsyncIterator[Incoming]:
        """One part by stream: the block adds its bytes; when it ends, they are staged. Generation goes on.

        Raises:
            Refusal: ABORTED, FAILED_PRECONDITION; RESOURCE_EXHAUSTED: no room; DATA_LOSS: the bytes are not those of the
                manifest; INVALID_ARGUMENT: not in order, not all, or beyond the part; CANCELLED: a newer stream has begun.
        """
        self._admit(manifest.run_id, manifest.term)
        try:
            async with self._intake.receive(manifest) as incoming:
                yield incoming
                source = await incoming.finish()
                if source is None:
                    raise RangeError(f"expected {manifest.nbytes} bytes; the stream ended after {incoming.position}")
                self._admit(manifest.run_id, manifest.term)  # a newer learner may have come meanwhile
                self._staging.put(source)
        except (RangeError, ManifestError) as error:
            raise Refusal("INVALID_ARGUMENT", str(error)) from None
        except DigestError as error:
            raise Refusal("DATA_LOSS", str(error)) from None
        except ConfigError as error:
            raise Refusal("RESOURCE_EXHAUSTED", str(error)) from None
        except SupersededError as error:
            raise Refusal("CANCELLED", str(error)) from None

    def _in_use(self) -> set[bytes]:
        """The arenas that the served version lies in, and those that the engine may be reading."""
        return {source.nonce for source in (*self._loading, *(self.served.sources if self.served else ()))}

    async def commit(self, run_id: str, id: VersionId) -> Committed:
        """Swaps the staged version in; done to the end even when the caller goes away.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT, FAILED_PRECONDITION; INTERNAL: the swap failed; tells what is served now.
            EngineDeadError: the engine is gone.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(run_id, id)))

    async def _commit(self, run_id: str, id: VersionId) -> Committed:
        async with self._lock:
            self._admit(run_id, id.term)
            if self.served and self.served.id == id:
                return Committed(id.version, 0.0, 0.0)
            if self.served and self.served.id.term == id.term and self.served.id.version > id.version:
                raise Refusal("FAILED_PRECONDITION", f"version {self.served.id.version} is served, newer than {id.version}")
            sources = self._staging.take(id)
            self._loading = (*sources, *(self.served.sources if self.served else ()))
            self.steady.clear()
            started = time.perf_counter()
            try:
                await self._engine.pause()
                try:
                    loaded = await self._engine.load(sources)
                except LoadError as error:
                    raise Refusal("INTERNAL", await self._fall_back(id, error)) from None
                self._staging.drop()
                self._failures = 0
                await self._serve(Served(id, sources), loaded)
            except EngineDeadError:
                self._lose()
                raise
            finally:
                self._loading = ()
            stall = time.perf_counter() - started
        log.info("serving version %d of term %d (stood still %.1f ms)", id.version, id.term, stall * 1e3)
        return Committed(id.version, stall, loaded.seconds)

    async def _fall_back(self, id: VersionId, error: LoadError) -> str:
        """After a failed load: the version before, or nothing. Returns what to tell the learner."""
        self._failures += 1
        self._staging.drop()
        before, self.served = self.served, None
        outcome = "nothing is served"
        if before:
            try:
                await self._serve(before, await self._engine.load(before.sources))
                outcome = f"version {before.id.version} is served again"
            except LoadError as again:
                outcome += f", for version {before.id.version} could not be restored: {again}"
        if self.served is None:
            self._lose()
        text = f"version {id.version} could not be loaded: {error}; {outcome}"
        if self.quarantined:
            text += f"; out of rotation after {self._failures} failed swaps in a row: restart this replica"
        log.error("%s", text)
        return text

    async def _serve(self, served: Served, loaded: Loaded) -> None:
        self._swaps += 1
        self._on_swap(served.id.version, loaded.sampled)
        await self._engine.resume()
        self.served = served
        self.steady.set()

    def _lose(self) -> None:
        self.served = None
        self._on_lost()
        self.steady.set()  # who waited finds nothing served

    def _admit(self, run_id: str, term: int) -> None:
        if run_id != self._run_id:
            raise Refusal("INVALID_ARGUMENT", f"this replica serves run {self._run_id}, not {run_id}")
        self._term = max(self._term, self._learner_term())
        if term < self._term:
            raise Refusal("ABORTED", f"term {term} is over: the learner of term {self._term} pushes to this replica")
        self._term = term
        if self.quarantined:
            raise Refusal(
                "FAILED_PRECONDITION", f"quarantined after {self._failures} failed swaps in a row: restart this replica"
            )


def _some(names: set[str] | frozenset[str]) -> str:
    few = ", ".join(sorted(names)[:3]) or "none"
    return few if len(names) <= 3 else f"{few} and {len(names) - 3} more"
