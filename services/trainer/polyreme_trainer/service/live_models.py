"""The models of the learner: which are in memory, what a restart needs to have them again, and how each of them ends.

Invariant: a model in memory is its newest saved state and the kept requests since. One that is given up, since taking it into
memory has ended the process MAX_BEGUN times, keeps both until it is unloaded, or another process tries again.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from polyreme.config.trainer import LoraConfig
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog, in_lane
from polyreme.experience.store_errors import RefusedError
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Facts
from polyreme_trainer.service.messages import name_of
from polyreme_trainer.service.observer.meters import StepMeters
from polyreme_trainer.service.states import States
from polyreme_trainer.service.tenant_engine import TenantEngine
from polyreme_trainer.service.wire import ENDED, Request

logger = logging.getLogger(__name__)


class Replay(NamedTuple):
    """What a restart would need to execute the kept requests of a model: seconds, and bytes of requests."""

    seconds: float = 0.0
    nbytes: int = 0


class LiveModels:
    """The models of one engine.

    Args:
        log, engine, states, base_model: as of `ModelLearner`.
        most: the largest number of models in memory.
        limit: a state is saved when the kept requests need more.
        again: executes requests that have had their results.
    """

    def __init__(
        self,
        log: RequestLog,
        engine: TenantEngine,
        states: States,
        base_model: str,
        most: int,
        limit: Replay,
        meters: StepMeters,
        again: Callable[[Mapping[LogPlace, Request]], Awaitable[object]],
    ) -> None:
        self._log, self._engine, self._states, self._base_model, self._most = log, engine, states, base_model, most
        self._limit, self._meters, self._again = limit, meters, again
        self._replay: dict[str, Replay] = {}
        self._saved: dict[str, int] = {}
        """The request after which each model's newest state was saved."""
        self._newest: dict[str, int] = {}
        """The newest request that the engine's state of each model includes; the model that was used last is the last one."""

    def name(self, lane: str) -> str:
        """The name of a model's base model for clients."""
        return name_of(self._base_model, lane in self._engine.critics)

    def load(self, lane: str, folder: Path, facts: Facts) -> None:
        """Gives a model what was saved in a directory, and creates the model if there is none."""
        is_critic = facts.base_model == name_of(self._base_model, critic=True)
        self._engine.load(lane, folder, facts.lora, facts.steps, is_critic)

    async def check_alone(self, lane: str, lora: LoraConfig | None) -> None:
        """Raises TenantError when a new model with these adapters and another one cannot be there together."""
        records = [await self._log.record("model", each) for each in await self._all() - {lane}]
        ranks = {record.get("rank") for record in records if record is not None}
        if ranks and (lora is None or "0" in ranks):
            raise TenantError("a model with all parameters shares the base model with no other model; unload the others first")

    async def _all(self) -> set[str]:
        """The models, of which some are only in a state, or in their kept requests."""
        return {*self._engine.models, *self._states.unfinished(), *await self._log.lanes()}

    async def recover(self, lane: str) -> str | None:
        """Makes a model what it was before a restart: its newest state, and the kept requests since. Returns why it is given up,
        or None."""
        if lane in self._engine.models:
            return None
        saved, kept = self._states.newest_state(lane), await self._log.kept(lane)
        if saved is None and not kept:  # it was unloaded, or could not be created
            return None
        if not await self._log.attempt(lane):
            return (
                f"expected a model that the learner can take into memory; it ended {MAX_BEGUN} times on it, see its log."
                " The model goes on when the service is started again, with more memory if that was missing. Or unload it."
            )
        await self.make_room()
        seq = -1
        if saved is not None:
            folder, facts = saved
            seq = self._saved[lane] = facts.seq
            self.load(lane, folder, facts)
            await self._log.forget(lane, seq)
        kept = [place for place in kept if place.seq > seq]
        if kept:
            logger.info("model %s: executing %d requests again", lane, len(kept))
        began, nbytes = time.monotonic(), 0
        with self._meters.replaying(lane):
            for place in kept:
                payload = await self._log.payload(place)
                await self._again({place: Request.unpack(payload)})
                nbytes += len(payload)
        self._replay[lane] = Replay(time.monotonic() - began, nbytes)
        if lane in self._engine.models:
            self._newest[lane] = max(seq, *(place.seq for place in kept)) if kept else seq
        await self._log.end_attempt(lane)
        return None

    def mark_used(self, place: LogPlace, changed: bool) -> None:
        """Tells that a request of a model was executed, and whether it was one that changes models."""
        if place.lane in self._engine.models:
            before = self._newest.pop(place.lane, place.seq)
            self._newest[place.lane] = place.seq if changed else before

    async def keep(self, place: LogPlace, seconds: float, nbytes: int) -> None:
        """Counts what a restart would have to execute again, and saves the model when that is too much."""
        before = self._replay.get(place.lane, Replay())
        self._replay[place.lane] = replay = Replay(before.seconds + seconds, before.nbytes + nbytes)
        if replay.seconds > self._limit.seconds or replay.nbytes > self._limit.nbytes:
            self.save_state(place)
        if self._saved.get(place.lane) == place.seq:
            await self._log.forget(place.lane, place.seq)
            self._replay[place.lane] = Replay()

    def save_state(self, place: LogPlace) -> None:
        """Saves the model after a request, so that a restart need not execute it again."""
        facts = Facts(self.name(place.lane), self._engine.models[place.lane], place.seq, self._engine.steps(place.lane))
        self._states.save_state(place.lane, partial(self._engine.save, place.lane, gradient=True), facts)
        self._saved[place.lane] = place.seq

    async def make_room(self) -> None:
        """Moves the models that were not used for longest to disk, until there is memory for another one."""
        while len(self._engine.models) >= self._most and self._newest:
            lane, seq = next(iter(self._newest.items()))
            if self._saved.get(lane) != seq:
                self.save_state(in_lane(lane, seq))
                await self._log.forget(lane, seq)
            self.forget(lane)

    def forget(self, lane: str) -> None:
        """Frees a model's memory. Its next request recovers it."""
        self._engine.remove(lane)
        self._newest.pop(lane, None)
        self._replay.pop(lane, None)

    # -- the ends

    async def unload(self, lane: str) -> None:
        """Ends a model that its client unloads, or that has expired. Its checkpoints stay."""
        self.forget(lane)
        self._meters.forget(lane)
        self._saved.pop(lane, None)
        self._states.remove(lane)
        await self._log.end_attempt(lane)
        await self._log.end(lane)

    async def end_uncreated(self, lane: str) -> None:
        """Frees the quota of a model that could not be created."""
        with suppress(RefusedError):  # for want of memory in Redis; the record expires later
            await self._log.set_record("model", lane, {ENDED: "not created"})
        await self._log.end(lane)

    async def sweep(self) -> None:
        """Ends the models whose records have expired, and deletes expired checkpoints."""
        for lane in await self._all():
            if await self._log.record("model", lane) is None:
                logger.info("model %s has expired", lane)
                await self.unload(lane)
        self._states.sweep()
