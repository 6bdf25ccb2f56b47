"""Generate: the sequences of one group become engine requests, and their tokens become one stream of chunks.

Invariant: a call ends with the end of every sequence, or with a status that gives the reason. When it ends in any other way, its
engine requests are aborted. A chunk waits briefly for other chunks of its call, since a message costs both sides far
more than a chunk in it. The end of a sequence does not wait.
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
from polyreme_rollout.engine.protocol import EngineDeadError, EngineRequest, InferenceEngine, Sampling
from polyreme_rollout.generation.requests import InvalidRequestError, RequestLimits, SequenceRequest, parse_sequences
from polyreme_rollout.generation.sequences import SequenceProgress
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.weights.weight_swap import WeightSwapper

GATHER_SECONDS = 0.2
"""Seconds that a chunk may wait for other chunks of its call. The death of a replica loses this much more generation."""


@dataclass(frozen=True)
class Identity:
    """The replica's part of DescribeResponse."""

    run_id: str
    replica_id: str
    model_fingerprint: str


class _PolicyLostError(Exception):
    """The replica serves no policy any more, so running sequences cannot finish here."""


class _PolicyChangedError(Exception):
    """The replica serves a version that the call may not use."""


class _Call:
    """The unsent results of one Generate call. `exact_version`: the only version that may sample; None: any."""

    def __init__(self, exact_version: int | None) -> None:
        self.exact_version = exact_version
        self.response = pb.GenerateResponse()
        self.must_send = asyncio.Event()
        self.open_sequences = 0
        self.failure: Exception | None = None
        self._gathering: asyncio.TimerHandle | None = None

    def send_soon(self) -> None:
        """Schedules the response, whose chunks may wait for others."""
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self.must_send.set)

    def take(self) -> pb.GenerateResponse:
        """The response to send. A new, empty one replaces it."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self.must_send.clear()
        response, self.response = self.response, pb.GenerateResponse()
        return response

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.must_send.set()


@dataclass
class _Sequence:
    """A sequence that is being sampled.

    Attributes:
        request_id: id of its current or last engine request.
        sampling: the task that reads that request's tokens; None before the first request.
    """

    progress: SequenceProgress
    call: _Call
    request_id: str = ""
    sampling: "asyncio.Task[None] | None" = None


class RolloutService(pb_grpc.RolloutServiceServicer):
    """Args: engine; identity; limits: of requests; metrics. `bind` sets the weight swapper."""

    def __init__(self, engine: InferenceEngine, identity: Identity, limits: RequestLimits, metrics: ReplicaMetrics) -> None:
        self._engine, self._identity, self._limits, self._metrics = engine, identity, limits, metrics
        self._swapper: WeightSwapper
        self._running: dict[int, _Sequence] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def bind(self, swapper: WeightSwapper) -> None:
        self._swapper = swapper

    @property
    def ready(self) -> bool:
        """Whether calls are accepted."""
        return self._swapper.served is not None and not self._swapper.quarantined and not self.draining

    @property
    def running(self) -> int:
        """Sequences that are being sampled."""
        return len(self._running)

    def on_swap(self, version: int, sampled: Mapping[str, int]) -> None:
        """Handles a change of the policy to `version`. `sampled`: tokens of each engine request at that moment.

        A request without a token starts again: its computed or cached prompt belongs to the previous version, while all its tokens would
        belong to this one. A request that has ended keeps the previous version: its last tokens may still be on their way.
        """
        for sequence in self._running.values():
            exact = sequence.call.exact_version
            if exact is not None and exact != version:
                sequence.call.fail(_PolicyChangedError(f"expected version {exact} up to the end; found version {version}"))
            if sequence.progress.sampled and sequence.request_id not in sampled:
                continue  # ended
            count = max(sampled.get(sequence.request_id, 0), sequence.progress.sampled)
            sequence.progress.change_version(version, count)
            if sequence.sampling is not None and not count:
                sequence.sampling.cancel()

    def on_lost(self) -> None:
        """Fails every running call, because no policy is left."""
        self.fail_running("a weight swap failed and no version could be restored: continue on another replica")

    def fail_running(self, reason: str) -> None:
        """Fails every running call with UNAVAILABLE."""
        for sequence in self._running.values():
            sequence.call.fail(_PolicyLostError(reason))

    async def drained(self) -> None:
        """Waits until no sequence is running."""
        await self._idle.wait()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self._refuse_unserved(request, context)
        try:
            sequences = parse_sequences(request, self._identity.run_id, self._limits)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if len(self._running) + len(sequences) > self._limits.max_sequences:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"expected at most {self._limits.max_sequences} sequences; "
                f"found {len(self._running)} running and {len(sequences)} more requested",
            )
        sampling = request.sampling
        shared = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop_token_ids))
        call = _Call(request.exact_version if request.HasField("exact_version") else None)
        tasks = [self._start(sequence, shared, call) for sequence in sequences]
        try:
            while call.open_sequences or call.must_send.is_set():  # the last sequences may end while a response is sent
                await call.must_send.wait()
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
            outstanding_tokens=sum(sequence.progress.outstanding for sequence in self._running.values()),
            quarantined=self._swapper.quarantined,
            engine=self._engine.name,
        )

    async def _refuse_unserved(self, request: pb.GenerateRequest, context: Any) -> None:
        version = await self._swapper.reach(request.min_version)
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this replica is draining: use another one")
        if self._swapper.quarantined or version is None or version < request.min_version:
            found = "a quarantined replica" if self._swapper.quarantined else "none" if version is None else f"version {version}"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"expected version {request.min_version} or newer; found {found}"
            )
        if request.HasField("exact_version") and version != request.exact_version:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"expected version {request.exact_version}; found version {version}"
            )

    def _start(self, request: SequenceRequest, sampling: Sampling, call: _Call) -> "asyncio.Task[None]":
        policy = self._swapper.policy
        assert policy is not None
        number = next(self._numbers)
        sequence = _Sequence(SequenceProgress(request.index, request.max_new, policy), call)
        self._running[number] = sequence
        self._idle.clear()
        call.open_sequences += 1
        self._metrics.active_sequences.inc()
        task = asyncio.ensure_future(self._sample(number, request, sampling, sequence))
        task.add_done_callback(lambda _: self._ended(number))
        return task

    def _ended(self, number: int) -> None:
        del self._running[number]
        self._metrics.active_sequences.dec()
        if not self._running:
            self._idle.set()

    async def _sample(self, number: int, request: SequenceRequest, sampling: Sampling, sequence: "_Sequence") -> None:
        try:
            for attempt in itertools.count():
                salt = await self._swapper.open_salt()
                sequence.request_id = f"polyreme.{number}.{attempt}"
                asked = EngineRequest(sequence.request_id, request.prompt_ids, request.max_new, request.seed, salt, sampling)
                sequence.sampling = asyncio.ensure_future(self._take_tokens(asked, sequence))
                try:
                    return await sequence.sampling
                except asyncio.CancelledError:
                    if not sequence.sampling.cancelled() or (own := asyncio.current_task()) is None or own.cancelling():
                        raise
                finally:
                    sequence.sampling.cancel()
        except Exception as error:  # noqa: BLE001 - becomes the call's status
            sequence.call.fail(error)

    async def _take_tokens(self, request: EngineRequest, sequence: "_Sequence") -> None:
        progress, call = sequence.progress, sequence.call
        async for delta in self._engine.generate(request):
            chunk = progress.add(delta)
            await self._swapper.steady.wait()  # a version's tokens wait for its canary
            if call.failure:
                return
            if chunk:
                call.response.chunks.append(chunk)
            if delta.finish:
                call.response.ends.append(progress.end(delta.finish))
                call.open_sequences -= 1
                self._metrics.sequences.labels(finish=delta.finish).inc()
                self._metrics.tokens.inc(progress.sampled)
                call.must_send.set()
            elif chunk:
                call.send_soon()

    async def _abort_failed(self, failure: Exception, context: Any) -> None:
        if isinstance(failure, EngineDeadError | _PolicyLostError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(failure))
        if isinstance(failure, _PolicyChangedError):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(failure))
        raise failure
