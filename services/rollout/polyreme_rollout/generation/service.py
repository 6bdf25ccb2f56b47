"""Generate and GenerateMany: the sequences of one group become engine requests, and their tokens become one stream of chunks.

Invariant: a call ends with the end of every sequence, or with a status that gives the reason. When it ends in any other way, its
engine requests are aborted. Tokens wait briefly for others of their call, since a message costs both sides far more than
the tokens in it. The end of a sequence does not wait.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from polyreme import API_VERSION
from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1 import rollout_pb2_grpc as pb_grpc
from polyreme.net.call_stream import CallError, CallStream
from polyreme.process.tasks import end_all
from polyreme_rollout.engine.protocol import EngineDeadError, EngineRequest, InferenceEngine, Sampling
from polyreme_rollout.generation.requests import InvalidRequestError, RequestLimits, SequenceRequest, parse_sequences
from polyreme_rollout.generation.running import (
    GATHER_SECONDS,
    MOST_GATHER_SECONDS,
    GenerateCall,
    PolicyChangedError,
    PolicyLostError,
    RunningSequence,
    RunningSequences,
)
from polyreme_rollout.generation.sequences import SequenceProgress
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.weights.weight_swap import WeightSwapper


@dataclass(frozen=True)
class Identity:
    """The replica's part of DescribeResponse."""

    run_id: str
    replica_id: str
    model_fingerprint: str


class RolloutService(pb_grpc.RolloutServiceServicer):
    """Args: engine; identity; limits: of requests; metrics; swapper; running: the sequences whose policy the swapper changes."""

    def __init__(
        self,
        engine: InferenceEngine,
        identity: Identity,
        limits: RequestLimits,
        metrics: ReplicaMetrics,
        swapper: WeightSwapper,
        running: RunningSequences,
    ) -> None:
        self._engine, self._identity, self._limits, self._metrics = engine, identity, limits, metrics
        self._swapper, self._running = swapper, running
        self._streams: set[CallStream[pb.GenerateRequest, pb.GenerateResponse]] = set()
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether calls are accepted."""
        return self._swapper.served is not None and not self._swapper.quarantined and not self.draining

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async with aclosing(self.responses(request)) as responses:
                async for response, _ in responses:
                    yield response
        except CallError as error:
            await context.abort(error.code, str(error))

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        stream = CallStream(self._answers, pb.GenerateManyResponse, self._limits.max_sequences)
        self._streams.add(stream)
        try:
            if self.draining:
                stream.end()
            async with aclosing(stream.run(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.discard(stream)

    def drain(self) -> None:
        """Refuses further calls."""
        self.draining = True
        for stream in self._streams:
            stream.end()

    async def _answers(
        self, requests: AsyncIterator[pb.GenerateRequest]
    ) -> AsyncGenerator[tuple[pb.GenerateResponse, bool], None]:
        async with aclosing(self.responses(await anext(requests))) as responses:
            async for each in responses:
                yield each

    async def responses(self, request: pb.GenerateRequest) -> AsyncGenerator[tuple[pb.GenerateResponse, bool], None]:
        """What answers a call, each with whether it is the last one. Raises CallError."""
        await self._check_served(request)
        try:
            sequences = parse_sequences(request, self._identity.run_id, self._limits)
        except InvalidRequestError as error:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        if len(self._running) + len(sequences) > self._limits.max_sequences:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"expected at most {self._limits.max_sequences} sequences; "
                f"found {len(self._running)} running and {len(sequences)} more requested",
            )
        sampling = request.sampling
        shared = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop_token_ids))
        gather = min(request.gather_ms / 1000, MOST_GATHER_SECONDS) if request.gather_ms else GATHER_SECONDS
        call = GenerateCall(request.exact_version if request.HasField("exact_version") else None, gather)
        tasks = [self._start(sequence, shared, call) for sequence in sequences]
        try:
            while call.open_sequences or call.must_send.is_set():  # the last sequences may end while a response is sent
                await call.must_send.wait()
                response = call.take()
                if response.chunks or response.ends:
                    yield response, not call.open_sequences and not call.failure
                if call.failure:
                    break
        finally:
            call.take()
            await end_all(tasks)
        if call.failure:
            raise _status_of(call.failure)

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        version = self._swapper.version
        return pb.DescribeResponse(
            run_id=self._identity.run_id,
            replica_id=self._identity.replica_id,
            api=API_VERSION,
            model_fingerprint=self._identity.model_fingerprint,
            has_version=version is not None,
            version=version or 0,
            max_model_len=self._limits.max_model_len,
            outstanding_tokens=self._running.outstanding_tokens,
            quarantined=self._swapper.quarantined,
            engine=self._engine.name,
        )

    async def _check_served(self, request: pb.GenerateRequest) -> None:
        """Raises CallError unless the version that a request needs is served."""
        version = await self._swapper.reach(request.min_version)
        if self.draining:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "this replica is draining: use another one")
        if self._swapper.quarantined or version is None or version < request.min_version:
            found = "a quarantined replica" if self._swapper.quarantined else "none" if version is None else f"version {version}"
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION, f"expected version {request.min_version} or newer; found {found}"
            )
        if request.HasField("exact_version") and version != request.exact_version:
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION, f"expected version {request.exact_version}; found version {version}"
            )

    def _start(self, request: SequenceRequest, sampling: Sampling, call: GenerateCall) -> "asyncio.Task[None]":
        policy = self._swapper.policy
        assert policy is not None
        sequence = self._running.add(SequenceProgress(request.index, request.max_new, policy), call)
        task = asyncio.ensure_future(self._sample(request, sampling, sequence))
        task.add_done_callback(lambda _: self._running.remove(sequence))
        return task

    async def _sample(self, request: SequenceRequest, sampling: Sampling, sequence: RunningSequence) -> None:
        try:
            for attempt in itertools.count():
                salt = await self._swapper.open_salt()
                sequence.request_id = f"polyreme.{sequence.number}.{attempt}"
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

    async def _take_tokens(self, request: EngineRequest, sequence: RunningSequence) -> None:
        progress, call = sequence.progress, sequence.call
        async for delta in self._engine.generate(request):
            chunk = progress.add(delta)
            await self._swapper.until_steady()  # a version's tokens wait for its canary
            if call.failure:
                return
            if chunk:
                call.add(chunk)
            if delta.finish:
                call.response.ends.append(progress.end(delta.finish))
                call.open_sequences -= 1
                self._metrics.sequences.labels(finish=delta.finish).inc()
                self._metrics.tokens.inc(progress.sampled)
                call.must_send.set()
            elif chunk:
                call.send_soon()


def _status_of(failure: Exception) -> Exception:
    """What a call raises that failed so."""
    if isinstance(failure, EngineDeadError | PolicyLostError):
        return CallError(grpc.StatusCode.UNAVAILABLE, str(failure))
    if isinstance(failure, PolicyChangedError):
        return CallError(grpc.StatusCode.FAILED_PRECONDITION, str(failure))
    return failure
