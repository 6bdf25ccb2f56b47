"""A replica's change of policy: commits all parts of a staged version at once, or rolls back.

Invariant:
- The replica serves a whole version with verified digests, or nothing. A failed swap restores the previous version; when that
  fails too, the replica serves nothing until a later version is committed.
- Nothing is sampled while the policy changes, and each running request records the token at which it changed.
- Between `paused_for_devices` and the next commit or `resume_if_paused`, nothing is sampled and no request is accepted. Neither
  of them continues sampling while the replica may not use the devices.
- The tokens that a version samples are delivered only after its canary has passed. Requests may wait in the engine for it
  meanwhile. A replica whose canary fails serves nothing until a later swap passes.

`swap_state` has the states between which a swap moves.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from polyreme.weights.canary import Canary, CanaryError
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.protocol import EngineDeadError, InferenceEngine, LoadError, LoadResult
from polyreme_rollout.weights.staged_parts import Refusal, VersionId
from polyreme_rollout.weights.staging import Staging
from polyreme_rollout.weights.swap_state import SwapPhase, SwapState

FAILURES_TO_QUARANTINE = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """The version in the engine's model, and the location of its parts."""

    id: VersionId
    sources: tuple[ArenaSource, ...]


@dataclass(frozen=True)
class Committed:
    """`stall_seconds`: from sampling's end to the engine's answer that it continues; `reload_seconds`: the slowest worker's load.

    `canary_difference`: see `Canary.check`; None without a canary.
    """

    version: int
    stall_seconds: float
    reload_seconds: float
    canary_difference: float | None = None


class WeightSwapper:
    """Commits and restores versions. Runs on one event loop. `staging` has the parts of the next version.

    Args:
        run_id: the run whose versions are accepted.
        engine: holds the weights.
        learner_term: returns the learner's term as last seen in Redis.
        on_swap: called while paused, with the new version and the number of tokens that each unfinished request has sampled.
        on_lost: called when no version could be restored, so running requests cannot continue.
        may_use_devices: returns whether the engine may sample now; a colocated replica asks its grant.
        canary_seconds: for the engine's answer to a canary, which it has within a few steps.
        commit_seconds: how long a request waits for the commit of a staged version.

    Attributes:
        failures: how many swaps have failed since the last one that did not.
    """

    def __init__(
        self,
        run_id: str,
        engine: InferenceEngine,
        learner_term: Callable[[], int],
        on_swap: Callable[[int, Mapping[str, int]], None],
        on_lost: Callable[[], None],
        may_use_devices: Callable[[], bool] = lambda: True,
        canary_seconds: float = 30.0,
        commit_seconds: float = 2.0,
    ) -> None:
        self._engine, self._on_swap, self._on_lost = engine, on_swap, on_lost
        self._may_use_devices = may_use_devices
        self._canary_seconds, self._commit_seconds = canary_seconds, commit_seconds
        self.staging = Staging(run_id, engine.weight_names, learner_term, self._quarantine_reason, self._in_use)
        self._loading: tuple[ArenaSource, ...] = ()
        self._lock = asyncio.Lock()
        self._swaps = 0
        self.failures = 0
        self._phase = SwapPhase()
        self.served: Served | None = None
        self._loaded: Served | None = None
        """The version that the engine has loaded last. It is the policy while its canary is asked."""

    @property
    def state(self) -> SwapState:
        return self._phase.state

    @property
    def version(self) -> int | None:
        return self.served.id.version if self.served else None

    @property
    def policy(self) -> int | None:
        """The version that the engine samples from: `version`, or its successor while the canary is asked."""
        return self._policy.id.version if self._policy else None

    @property
    def _policy(self) -> Served | None:
        return self._loaded if self.state is SwapState.CHECKING else self.served

    @property
    def salt(self) -> str:
        """Requests share cached prefixes only under the same salt, and each set of weights has its own."""
        policy = self._policy
        return f"{policy.id.term}.{policy.id.version}.{self._swaps}" if policy else f"none.{self._swaps}"

    async def until_steady(self) -> None:
        """Waits for the end of a swap. What was sampled before may then be delivered."""
        await self._phase.until_steady()

    async def open_salt(self) -> str:
        """The salt of a request submitted now, whose tokens wait for `until_steady`. Waits for the load of a running swap."""
        await self._phase.until_admitting()
        return self.salt

    async def steady_salt(self) -> str:
        """The salt of a request that is submitted now. Waits for the end of a swap."""
        await self.until_steady()
        return self.salt

    async def reach(self, version: int) -> int | None:
        """The engine's policy, once a request for `version` or newer may be submitted; the present policy, or None, on timeout.

        Waits for the load of a running swap. Waits up to `commit_seconds` for that of `version`, and only if it is staged.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._commit_seconds):
                while self.state.admits and (-1 if self.policy is None else self.policy) < version <= self.staging.version:
                    await self._phase.changed()
        await self._phase.until_admitting()
        return self.policy

    async def steady_version(self) -> int | None:
        """The served version, or None. Waits for the end of a swap."""
        await self.until_steady()
        return self.version

    @property
    def quarantined(self) -> bool:
        return self.failures >= FAILURES_TO_QUARANTINE

    def _in_use(self) -> set[bytes]:
        """The nonces of the served version's arenas, and of those that the engine may be reading."""
        return {source.nonce for source in (*self._loading, *(self.served.sources if self.served else ()))}

    async def commit(self, run_id: str, id: VersionId, canary: Canary | None = None) -> Committed:
        """Swaps the staged version in. Completes even when the caller disconnects.

        Raises:
            Refusal: ABORTED, INVALID_ARGUMENT; FAILED_PRECONDITION, also when the devices may not be used; INTERNAL: the swap or
                its canary failed; the message names the version that is served now.
            EngineDeadError: the engine has died.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(run_id, id, canary)))

    async def _commit(self, run_id: str, id: VersionId, canary: Canary | None) -> Committed:
        async with self._lock:
            self.staging.admit(run_id, id.term)
            if self.served and self.served.id == id:
                return Committed(id.version, 0.0, 0.0)
            if self.served and self.served.id.term == id.term and self.served.id.version > id.version:
                raise Refusal(
                    "FAILED_PRECONDITION",
                    f"expected a version after {self.served.id.version}, which is served; found {id.version}",
                )
            self._check_devices()
            sources = self.staging.take(id)
            self._loading = (*sources, *(self.served.sources if self.served else ()))
            self._phase.enter(SwapState.LOADING)
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
    async def paused_for_devices(self) -> AsyncIterator[None]:
        """In the block no swap and no sampling runs, and new requests wait. Then a commit or `resume_if_paused` resumes sampling.

        Raises EngineDeadError.
        """
        async with self._lock:
            if self.state.steady:  # otherwise it still is paused, or a load was broken off and its weights are to be loaded again
                self._phase.enter(SwapState.PAUSED)
            await self._engine.pause()
            yield

    async def resume_if_paused(self, weights: bool) -> None:
        """Continues sampling after `paused_for_devices`, unless a commit has continued it or the devices may not be used.

        Args:
            weights: whether the engine has kept them. If not, it loads the served version again.

        Raises:
            EngineDeadError: the engine has died.
        """
        async with self._lock:
            if self.state.steady or not self._may_use_devices():
                return
            if self.served is None or (weights and self.state is SwapState.PAUSED):
                await self._engine.resume()
                self._phase.enter(SwapState.SERVING if self.served else SwapState.EMPTY)
                return
            try:
                self._phase.enter(SwapState.LOADING)
                loaded = await self._engine.load(self.served.sources)
                if self._may_use_devices():
                    await self._resume(self.served, loaded)
                    self._serve(self.served)
            except LoadError as error:
                logger.error("version %d could not be loaded again; nothing is served: %s", self.served.id.version, error)
                self._lose()

    async def _swap(self, new: Served, canary: Canary | None) -> Committed:
        """Pauses, loads, resumes, and checks the canary. Raises Refusal(INTERNAL), EngineDeadError."""
        try:
            loaded = await self._engine.load(new.sources)
        except LoadError as error:
            raise Refusal("INTERNAL", await self._fall_back(new.id, error)) from None
        self._check_devices()  # the grant may have ended by now; `resume_if_paused` then loads the served version again
        self.staging.drop()
        await self._resume(new, loaded)
        stall = time.perf_counter() - loaded.stopped
        try:
            difference = await self._ask_canary(canary) if canary else None
        except CanaryError as error:
            self.failures += 1
            self._lose()
            text = f"version {new.id.version} failed its canary: {error}; nothing is served{self._quarantine_notice()}"
            logger.error("%s", text)
            raise Refusal("INTERNAL", text) from None
        self.failures = 0
        self._serve(new)
        return Committed(new.id.version, stall, loaded.seconds, difference)

    async def _ask_canary(self, canary: Canary) -> float:
        """Checks the canary and returns its difference. Raises CanaryError, also when the engine does not answer in time."""
        try:
            async with asyncio.timeout(self._canary_seconds):
                return canary.check(await self._engine.logprobs(canary.ids, f"canary.{self.salt}"))
        except TimeoutError:
            raise CanaryError(f"expected the engine's answer within {self._canary_seconds:g} s; found none") from None

    async def _fall_back(self, id: VersionId, error: LoadError) -> str:
        """Restores the previous version after a failed load, or serves nothing. Returns the message for the learner."""
        self.failures += 1
        self.staging.drop()
        before, self.served = self.served, None
        outcome = "nothing is served"
        if before:
            try:
                loaded = await self._engine.load(before.sources)
                self.served = before
                self._check_devices()
                await self._resume(before, loaded)
                self._serve(before)
                outcome = f"version {before.id.version} is served again"
            except LoadError as again:
                outcome += f" because version {before.id.version} could not be restored: {again}"
        if self.served is None:
            self._lose()
        text = f"version {id.version} could not be loaded: {error}; {outcome}{self._quarantine_notice()}"
        logger.error("%s", text)
        return text

    def _quarantine_reason(self) -> str:
        return f"quarantined after {self.failures} consecutive failed swaps: restart this replica" if self.quarantined else ""

    def _quarantine_notice(self) -> str:
        return f"; {reason}" if (reason := self._quarantine_reason()) else ""

    async def _resume(self, served: Served, loaded: LoadResult) -> None:
        """Continues sampling with the weights that were just loaded."""
        self._swaps += 1
        self._loaded = served
        self._on_swap(served.id.version, loaded.sampled)
        self._phase.enter(SwapState.CHECKING)
        await self._engine.resume()

    def _check_devices(self) -> None:
        """Raises Refusal(FAILED_PRECONDITION) when the devices may not be used."""
        if not self._may_use_devices():
            raise Refusal("FAILED_PRECONDITION", "expected a grant of the devices; found that it has ended")

    def _serve(self, served: Served) -> None:
        """Ends the swap: the tokens of `served` are delivered."""
        self.served = served
        self._phase.enter(SwapState.SERVING)

    def _lose(self) -> None:
        """Ends the swap without a version."""
        self.served = None
        self._on_lost()
        self._phase.enter(SwapState.EMPTY)  # waiting calls then find that nothing is served
