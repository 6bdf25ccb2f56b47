"""The publisher: a thread that brings complete versions to the replicas while the learner trains on.

Kept here: the learner's thread never waits for a replica, except where it asks to (`acquire_slot`, `wait_committed`) and then to
a deadline; what goes wrong in the thread is raised by the learner's next call.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from polyreme.errors import PolyremeError, RunFailedError
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Term, TransitionError
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RIDE_OVER, connect
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest
from polyreme_trainer.weight_sync.eval_hold import Hold
from polyreme_trainer.weight_sync.replica_client import Version
from polyreme_trainer.weight_sync.replica_sync import Commit, Fleet

START_SECONDS = 75.0  # Redis may be away for a minute
ATTACH_SECONDS = 5.0  # the learner is in the run already
CLOSE_SECONDS = 10.0
ANSWER_SECONDS = 90.0  # beyond a question's own deadline: Redis may be away for a minute

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Life:
    """What the thread's event loop runs."""

    loop: asyncio.AbstractEventLoop
    fleet: Fleet


class Publisher:
    """Pushes the newest version to every rollout replica with a lease, now and whenever one joins.

    It has an event loop and a Redis connection of its own. `acquire_slot` and `wait_committed` are awaited in the caller's loop.

    A defect in it fails the run, and so does the quarantine of every replica; the loss of the term or of Redis ends this learner alone.

    Args:
        redis_url, run_id: the run.
        term: the learner's.
        arena: this host's; the publisher reads it and does not close it.
    """

    def __init__(self, redis_url: str, run_id: str, term: Term, arena: Arena) -> None:
        self._redis_url, self._run_id, self._term, self._arena = redis_url, run_id, term, arena
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="publisher", daemon=True)
        self._life: Future[_Life] = Future()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Starts the thread and waits until it is connected. Raises StoreError, UnavailableError."""
        self._thread.start()
        self._life.result(START_SECONDS)

    def publish(self, manifest: Manifest, slot: int, generation: int) -> None:
        """Makes the version in `slot` the newest. Digests that the manifest lacks are computed in the publisher's thread.

        Raises:
            ArenaError: the slot is not complete at `generation`.
            StaleTermError: another learner has taken over.
        """
        self._arena.check(slot, generation)

        async def announce(fleet: Fleet) -> None:
            sealed = manifest if manifest.sealed else seal(manifest, self._arena.slot_view(slot))
            fleet.publish(Version(sealed.to_proto(), slot, generation))

        self._submit(announce).add_done_callback(self._keep_failure)

    async def acquire_slot(self, seconds: float) -> int:
        """A slot to write the next version into. Replicas that hold every slot past `seconds` are quarantined.

        Raises:
            StaleTermError: another learner has taken over.
        """
        return await self._ask(lambda fleet: fleet.acquire_slot(seconds), seconds)

    async def wait_committed(self, version: int, replicas: int, seconds: float) -> list[Commit]:
        """The commits of at least `replicas` replicas that serve `version` or a newer one.

        Raises:
            UnavailableError: there are fewer after `seconds`; says what each replica does.
            StaleTermError: another learner has taken over.
        """
        return await self._ask(lambda fleet: fleet.wait_committed(version, replicas, seconds), seconds)

    def close(self) -> None:
        """Ends the thread; pushes under way are cancelled. Idempotent."""
        if not self._thread.is_alive():
            return
        if self._life.exception(START_SECONDS) is None:
            life = self._life.result()
            with suppress(RuntimeError):  # the loop is closed: the thread ends by itself
                life.loop.call_soon_threadsafe(life.fleet.stop)
        self._thread.join(CLOSE_SECONDS)

    async def _ask(self, question: Callable[[Fleet], Coroutine[Any, Any, T]], seconds: float) -> T:
        """`question` has its own deadline of `seconds`; this one is for a thread that ends without an answer."""
        try:
            async with asyncio.timeout(seconds + ANSWER_SECONDS):
                return await asyncio.wrap_future(self._submit(question))
        except (asyncio.CancelledError, TimeoutError):
            self._raise_failure()  # it was the publisher's loop that ended
            raise

    def _submit(self, question: Callable[[Fleet], Coroutine[Any, Any, T]]) -> "Future[T]":
        self._raise_failure()
        life = self._life.result(0)
        return asyncio.run_coroutine_threadsafe(question(life.fleet), life.loop)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, PolyremeError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the publisher's thread has failed") from self._failure

    def _keep_failure(self, future: "Future[None]") -> None:
        if not future.cancelled() and future.exception() is not None:
            self._failure = self._failure or future.exception()

    async def _live(self) -> None:
        try:
            redis = await connect(self._redis_url, RIDE_OVER)
            try:
                await self._follow(await Run.attach(redis, self._run_id, ATTACH_SECONDS))
            finally:
                await redis.aclose()
        except Exception as error:
            log.error("the publisher ends", exc_info=error)
            self._failure = error  # set before the loop ends and cancels who waits for an answer
            if not self._life.done():
                self._life.set_exception(error)

    async def _follow(self, run: Run) -> None:
        config = await run.config()
        hold = Hold(config.holds, config.eval_hold)
        log, wanted = ExperienceLog(run, self._term), config.rollout.replicas
        fleet = Fleet(run, log, Registry(run), self._arena, self._term.counter, wanted, hold, config.security)
        self._life.set_result(_Life(asyncio.get_running_loop(), fleet))
        try:
            await fleet.follow()
        except Exception as error:
            if isinstance(error, PolyremeError) and not isinstance(error, RunFailedError):
                raise
            # The learner may be waiting for samples, which would never come without a push: this ends its wait.
            defect = f"the weight publisher failed: {type(error).__name__}: {error}"
            with suppress(TransitionError):
                await run.set_state(RunState.FAILED, str(error) if isinstance(error, RunFailedError) else defect)
            raise
