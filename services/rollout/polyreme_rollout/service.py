"""Generate: the slots of one group become engine requests, their tokens one stream of chunks.

Kept here: a call ends with every slot's end, or with a status that says why not; when it ends in any other way, its requests in
the engine end too. A chunk waits for others of its call for a moment, a slot's end does not: a message costs both sides far more
than a chunk in it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from polyreme import API_VERSION
from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1 import rollout_pb2_grpc as pb_grpc
from polyreme_rollout.engine.base import Engine, EngineDeadError, EngineRequest, Sampling
from polyreme_rollout.metrics import Metrics
from polyreme_rollout.requests import InvalidRequestError, Limits, SlotPlan, plan_slots
from polyreme_rollout.sequences import SlotProgress
from polyreme_rollout.weight_swap import Swapper

GATHER_SECONDS = 0.2
"""How long a chunk may wait for others of its call; so many seconds of tokens more are lost with a replica that dies."""


@dataclass(frozen=True)
class Identity:
    """What this replica is: see DescribeResponse."""

    run_id: str
    replica_id: str
    model_fingerprint: str


class _LostError(Exception):
    """The replica has no policy any more that could finish the slot."""


class _Call:
    """One Generate call's results on their way to the client."""

    def __init__(self) -> None:
        self.response = pb.GenerateResponse()
        self.news = asyncio.Event()
        self.open_slots = 0
        self.failure: Exception | None = None
        self._gathering: asyncio.TimerHandle | None = None

    def gather(self) -> None:
        """There is a chunk, which may wait."""
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self.news.set)

    def take(self) -> pb.GenerateResponse:
        """What there is to send."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self.news.clear()
        response, self.response = self.response, pb.GenerateResponse()
        return response

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.news.set()


class RolloutService(pb_grpc.RolloutServiceServicer):
    """Args: engine; identity; limits: what a request may ask; metrics. `bind` gives it the swap machine."""

    def __init__(self, engine: Engine, identity: Identity, limits: Limits, metrics: Metrics) -> None:
        self._engine, self._identity, self._limits, self._metrics = engine, identity, limits, metrics
        self._swapper: Swapper
        self._slots: dict[str, tuple[SlotProgress, _Call]] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def bind(self, swapper: Swapper) -> None:
        self._swapper = swapper

    @property
    def ready(self) -> bool:
        """Whether calls are taken."""
        return self._swapper.served is not None and not self._swapper.quarantined and not self.draining

    def on_swap(self, version: int, sampled: Mapping[str, int]) -> None:
        """The policy changed to `version`; `sampled`: tokens that the engine's requests had by then."""
        for request_id, (slot, _) in self._slots.items():
            slot.cut(version, sampled.get(request_id, 0))

    def on_lost(self) -> None:
        """No policy is left: everything under way fails."""
        for _, call in self._slots.values():
            call.fail(_LostError("a weight swap failed and no version could be restored: continue the slots elsewhere"))

    async def drained(self) -> None:
        """Waits until no slot is under way."""
        await self._idle.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self._refuse_unserved(request, context)
        try:
            plans = plan_slots(request, self._identity.run_id, self._limits)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if len(self._slots) + len(plans) > self._limits.max_slots:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._slots)} slots are under way and {len(plans)} more would pass {self._limits.max_slots}",
            )
        sampling = request.sampling
        shared = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop_token_ids))
        call = _Call()
        tasks = [self._start(plan, shared, call) for plan in plans]
        try:
            while call.open_slots or call.news.is_set():  # the last slots may end while a response is being sent
                await call.news.wait()
                response = call.take()
                if response.chunks or response.ends:
                    yield response
                if call.failure:
                    break
        finally:
            call.take()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if call.failure:
            await self._abort_failed(call.failure, context)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        version = self._swapper.version
        return pb.DescribeResponse(
            run_id=self._identity.run_id,
            replica_id=self._identity.replica_id,
            api=API_VERSION,
            model_fingerprint=self._identity.model_fingerprint,
            has_version=version is not None,
            version=version or 0,
            max_model_len=self._limits.max_model_len,
            outstanding_tokens=sum(slot.outstanding for slot, _ in self._slots.values()),
            quarantined=self._swapper.quarantined,
            engine=self._engine.name,
        )

    async def _refuse_unserved(self, request: pb.GenerateRequest, context: Any) -> None:
        await self._swapper.steady.wait()
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this replica drains: ask another one")
        version = self._swapper.version
        if self._swapper.quarantined or version is None or version < request.min_version:
            found = "is quarantined" if self._swapper.quarantined else f"serves {'none' if version is None else version}"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"version {request.min_version} or newer is asked for; this replica {found}"
            )

    def _start(self, plan: SlotPlan, sampling: Sampling, call: _Call) -> "asyncio.Task[None]":
        assert self._swapper.version is not None
        request_id = f"polyreme.{next(self._numbers)}"
        slot = SlotProgress(plan.index, plan.max_new, self._swapper.version)
        self._slots[request_id] = slot, call
        self._idle.clear()
        call.open_slots += 1
        self._metrics.active_slots.inc()
        task = asyncio.ensure_future(self._sample(request_id, plan, sampling, slot, call))
        task.add_done_callback(lambda _: self._ended(request_id))
        return task

    def _ended(self, request_id: str) -> None:
        del self._slots[request_id]
        self._metrics.active_slots.dec()
        if not self._slots:
            self._idle.set()

    async def _sample(self, request_id: str, plan: SlotPlan, sampling: Sampling, slot: SlotProgress, call: _Call) -> None:
        try:
            salt = await self._swapper.steady_salt()
            request = EngineRequest(request_id, plan.prompt_ids, plan.max_new, plan.seed, salt, sampling)
            async for delta in self._engine.generate(request):
                chunk = slot.add(delta)
                if chunk:
                    call.response.chunks.append(chunk)
                if delta.finish:
                    call.response.ends.append(slot.end(delta.finish))
                    call.open_slots -= 1
                    self._metrics.slots.labels(finish=delta.finish).inc()
                    self._metrics.tokens.inc(slot.sampled)
                    call.news.set()
                elif chunk:
                    call.gather()
        except Exception as error:  # noqa: BLE001 - becomes the call's status
            call.fail(error)

    async def _abort_failed(self, failure: Exception, context: Any) -> None:
        if isinstance(failure, EngineDeadError | _LostError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(failure))
        raise failure
