"""A replica's receive side on an engine of plain memory: the real weights service, weight swapper, lease and gRPC server."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import xxhash

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.net import rpc
from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.manifest import ArenaSource, tensor_views
from polyreme_rollout.engine.protocol import EngineRequest, LoadError, LoadResult, NewTokens, Slept, TensorDigest, TopTokens
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.weights.relay import TransferLimits
from polyreme_rollout.weights.weight_swap import WeightSwapper
from polyreme_rollout.weights.weights_service import WeightsService
from support.proxy import Proxy, bad_network

SERVICE = "polyreme.api.v1.WeightsService"


def scores(weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> list[float]:
    """The answer of `MemoryEngine` to a canary: numbers that depend on every byte of the weights."""
    digest = xxhash.xxh3_64(b"".join(weights[name].tobytes() for name in sorted(weights))).intdigest()
    return [-((digest ^ token) % 1009) / 1009 for token in ids[1:]]


class MemoryEngine:
    """An engine whose model is a dictionary of arrays; it samples nothing.

    `weights` is its content. The next `broken_loads` loads fail half way; the next `stale_loads` keep the tensor `norm`. While `may_load` is clear, loads wait; while `has_place` is
    clear, canaries wait.
    """

    name, max_model_len, vocab_size, dead = "memory", 8, 8, False
    reports_routes = False

    def __init__(self, weight_names: Sequence[str]) -> None:
        self.weight_names = frozenset(weight_names)
        self.weights: dict[str, np.ndarray] = {}
        self.broken_loads = self.stale_loads = 0
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.has_place = asyncio.Event()
        self.has_place.set()
        self.paused = False

    async def open(self) -> None:
        pass

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        raise NotImplementedError
        yield

    async def logprobs(self, ids: Sequence[int], salt: str) -> Sequence[float]:
        assert not self.paused
        await self.has_place.wait()
        return scores(self.weights, ids)

    async def top_logprobs(self, ids: Sequence[int], count: int, salt: str) -> Sequence[TopTokens]:
        raise NotImplementedError

    async def pause(self) -> None:
        self.paused = True

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        started, self.paused = time.perf_counter(), True
        kept = {"norm": self.weights["norm"]} if self.stale_loads and self.weights else {}
        self.stale_loads -= len(kept)
        await self.may_load.wait()
        for source in sources:
            arena = Arena.open(source.path)
            try:
                self._load(source, arena)
            except ArenaError as error:
                raise LoadError(str(error)) from None
            finally:
                arena.close()
        self.weights |= kept
        return LoadResult(started, time.perf_counter() - started, sampled={})

    def _load(self, source: ArenaSource, arena: Arena) -> None:
        arena.check(source.slot, source.generation)
        for name, view in tensor_views(source.manifest, arena.slot_view(source.slot)).items():
            self.weights[name] = view.copy()
            if self.broken_loads:
                self.broken_loads -= 1
                raise LoadError("broken on command")
        arena.check(source.slot, source.generation)

    async def resume(self) -> None:
        self.paused = False

    async def sleep(self) -> Slept:
        assert self.paused
        self.weights.clear()
        return Slept(0, weights=False, cache=False)

    async def wake(self) -> None:
        assert self.paused

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> Any:
        raise NotImplementedError

    async def weight_digests(self) -> Sequence[Mapping[str, TensorDigest]]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Receiver(WeightsService):
    """The service. `versions` lists all served versions, `calls` every call, and `term` is the learner's term that it knows.

    `has_devices`: whether the engine may sample.
    `maps`: whether it is on the trainer's host; `reaches_replicas`: whether other replicas' addresses work here. While `may_send` is clear,
    other replicas wait for its bytes. `swaps`: arguments of its weight swapper.
    """

    def __init__(self, run_id: str, weight_names: Sequence[str], security: SecurityConfig | None = None, **swaps: float) -> None:
        self.engine = MemoryEngine(weight_names)
        self.versions: list[int] = []
        self.calls: deque[str] = deque(maxlen=1000)
        self.term = 0
        self.has_devices = True
        self.may_send = asyncio.Event()
        self.may_send.set()
        swapper = WeightSwapper(
            run_id,
            self.engine,
            lambda: self.term,
            lambda version, _sampled: self.versions.append(version),
            lambda: None,
            lambda: self.has_devices,
            **swaps,
        )
        self.metrics = ReplicaMetrics()
        self.maps = self.reaches_replicas = True
        super().__init__(swapper, self.metrics, self._committed, security, TransferLimits(connect=300.0))

    async def _committed(self) -> None:
        pass

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self.engine.weights

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        self.calls.append("Probe")
        if not self.maps:
            return pb.ProbeResponse(can_map=False, reason="another host")
        return await super().Probe(request, context)

    async def StageArena(self, request: pb.StageArenaRequest, context: Any) -> pb.StageResponse:
        self.calls.append("StageArena")
        return await super().StageArena(request, context)

    async def StageStream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        self.calls.append("StageStream")
        await super().StageStream(messages, context)

    async def StageRelay(self, request: pb.StageRelayRequest, context: Any) -> pb.StageRelayResponse:
        self.calls.append("StageRelay")
        if not self.reaches_replicas:
            request.source = "127.0.0.1:1"
        return await super().StageRelay(request, context)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        self.calls.append("Fetch")
        await self.may_send.wait()
        await super().Fetch(request, context)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        self.calls.append("Commit")
        return await super().Commit(request, context)


@asynccontextmanager
async def serving(receiver: Receiver, port: int = 0, security: SecurityConfig | None = None) -> AsyncIterator[int]:
    """Runs the receiver behind a gRPC server. Yields its port."""

    def add(server: grpc.aio.Server) -> None:
        receiver.add_to(server)

    async with rpc.serve("127.0.0.1", port, add, [SERVICE], grace=0.1, security=security) as server:
        yield server.port
    receiver.engine.may_load.set()  # a swap finishes even when the call has ended


@asynccontextmanager
async def replica(registry: Registry, name: str, receiver: Receiver) -> AsyncIterator[Receiver]:
    """A receiver with a lease."""
    async with serving(receiver) as port, await registry.register(lease(name, port)):
        yield receiver


@asynccontextmanager
async def proxied(registry: Registry, name: str, receiver: Receiver) -> AsyncIterator[Proxy]:
    """A receiver with a lease that names a proxy in front of it. Yields the proxy."""
    async with (
        serving(receiver) as port,
        bad_network("127.0.0.1", port) as proxy,
        await registry.register(lease(name, proxy.port)),
    ):
        yield proxy


def lease(name: str, port: int) -> Lease:
    return Lease(kind="rollout", id=name, address=f"127.0.0.1:{port}", http_address=f"127.0.0.1:{port}", api=1)
