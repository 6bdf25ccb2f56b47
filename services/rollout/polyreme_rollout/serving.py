"""A replica's servers and its lease, around an engine that runs.

Kept here: the lease exists only while calls are answered. When the stop comes, the lease goes first, then new calls are refused,
slots under way get their time, and then the servers end.
"""

import asyncio
import logging
import socket
import uuid
from contextlib import AsyncExitStack, suppress
from typing import Any

from polyreme import API_VERSION
from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2
from polyreme.errors import PolyremeError
from polyreme.experience.leases import Lease, LeaseKeeper, Registry
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.net.endpoint import Place
from polyreme_rollout import http
from polyreme_rollout.metrics import Metrics
from polyreme_rollout.replica import Orders
from polyreme_rollout.requests import Limits
from polyreme_rollout.service import Identity, RolloutService
from polyreme_rollout.weight_swap import Swapper
from polyreme_rollout.weights_service import WeightsService

DRAIN_SECONDS = 20.0
WATCH_SECONDS = 0.5
QUEUED_PER_RUNNING = 16  # slots taken per slot that can be decoded at once

_SERVICES = [
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,
    weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].full_name,
]

log = logging.getLogger(__name__)


async def serve(engine: Any, orders: Orders, redis_url: str, place: Place, stop: asyncio.Event) -> None:
    """Serves an open engine until `stop`, then drains.

    Raises:
        StoreError, ConfigError: see their messages. PolyremeError: the engine is gone, which a start of this process mends.
    """
    redis = await connect(redis_url)
    metrics = Metrics()
    replica_id = f"rollout-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    limits = Limits(engine.max_model_len, engine.vocab_size, QUEUED_PER_RUNNING * orders.config.rollout.max_num_seqs)
    service = RolloutService(engine, Identity(orders.run_id, replica_id, orders.model_fingerprint), limits, metrics)
    keeper: LeaseKeeper | None = None
    swapper = Swapper(orders.run_id, engine, lambda: keeper.learner_term if keeper else 0, service.on_swap, service.on_lost)
    service.bind(swapper)

    async def announce() -> None:
        metrics.version.set(-1 if swapper.version is None else swapper.version)
        metrics.ready.set(service.ready)
        await server.set_ready(service.ready)

    def add(grpc_server: Any) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, grpc_server)
        WeightsService(swapper, metrics, announce).add_to(grpc_server)

    try:
        async with AsyncExitStack() as servers:
            server = await servers.enter_async_context(
                rpc.serve(place.host, place.port, add, _SERVICES, security=orders.config.security)
            )
            http_address = ""
            if place.http_port is not None:
                app = http.make_app(
                    lambda: not engine.dead,
                    lambda: service.ready,
                    metrics,
                    lambda: engine.openai_app(orders.config.name, swapper.steady_salt),
                )
                bound = http.bind(place.host, place.http_port)
                http_port = await servers.enter_async_context(http.serve(app, bound, orders.config.security))
                http_address = place.http_address(http_port)
            lease = Lease(
                "rollout", replica_id, place.grpc_address(server.port), http_address, API_VERSION,
                {"model_fingerprint": orders.model_fingerprint, "max_model_len": engine.max_model_len,
                 "tensor_parallel": orders.config.rollout.tensor_parallel, "engine": engine.name},
            )  # fmt: skip
            run = Run(redis, orders.run_id)
            if orders.newest:
                await servers.enter_async_context(run.telling(stop))
            async with await Registry(run).register(lease) as keeper:
                log.info(
                    "%s: gRPC at %s, HTTP at %s, %s", replica_id, lease.address, lease.http_address or "no port", engine.name
                )
                await _until_stopped(stop, engine)
            service.draining = True
            await announce()
            with suppress(TimeoutError):
                await asyncio.wait_for(service.drained(), DRAIN_SECONDS)
    finally:
        await redis.aclose()


async def _until_stopped(stop: asyncio.Event, engine: Any) -> None:
    """Raises PolyremeError when the engine is gone: of no kind whose exit code tells a supervisor not to start the replica again."""
    while not stop.is_set():
        if engine.dead:
            raise PolyremeError("the engine to run", "it is gone", "See the log above; start the replica again.")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_SECONDS)
