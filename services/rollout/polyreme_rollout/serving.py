"""A replica's servers and its lease, around a running engine.

Invariant: the lease exists only while calls are answered. At the end the lease is removed first, then new calls are refused,
running sequences get time to finish, and then the servers end.
"""

import asyncio
import logging
import socket
import uuid
from contextlib import AsyncExitStack, suppress

import grpc

from polyreme import API_VERSION
from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2
from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import serve_http
from polyreme.process.lifecycle import StopEvent, until_set
from polyreme.process.machine import MemoryKills, killed_for_memory_since
from polyreme.process.tasks import unless
from polyreme_rollout.devices.device_start import StartupGrant
from polyreme_rollout.devices.device_turns import ReplicaTurns
from polyreme_rollout.engine.protocol import InferenceEngine
from polyreme_rollout.generation.requests import RequestLimits
from polyreme_rollout.generation.running import RunningSequences
from polyreme_rollout.generation.service import Identity, RolloutService
from polyreme_rollout.http.http_app import make_app
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.run_spec import RunSpec
from polyreme_rollout.weights.weight_swap import WeightSwapper
from polyreme_rollout.weights.weights_service import WeightsService

DRAIN_TIMEOUT = 20.0
ENGINE_CHECK_INTERVAL = 0.5
QUEUED_PER_RUNNING = 16  # accepted sequences per decode slot

_SERVICES = [
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,
    weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].full_name,
]

logger = logging.getLogger(__name__)


async def serve(
    engine: InferenceEngine, spec: RunSpec, redis_url: str, endpoint: Endpoint, stop: StopEvent, held: StartupGrant | None = None
) -> bool:
    """Serves an open engine until `stop`, then drains. Returns whether it ended for a learner that wants the devices.

    Args:
        held: the device grant under which the engine has started. Without one, a colocated replica waits for a grant before it
        registers its lease, and its running engine must not use a device until then.

    Raises:
        StoreError, ConfigError: see their messages. StaleGrantError: `held` has ended. PolyremeError: the engine has died; a
            restart of this process helps in both cases.
    """
    redis = await connect(redis_url)
    metrics = ReplicaMetrics()
    replica_id = f"rollout-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    limits = RequestLimits(engine.max_model_len, engine.vocab_size, QUEUED_PER_RUNNING * spec.config.rollout.max_num_seqs)
    run = Run(redis, spec.run_id)
    registry, running = Registry(run), RunningSequences(metrics)
    device = None
    if spec.config.placement == "colocated":
        device = DeviceLease(run, "generate", held.holder if held else replica_id, counter=held.counter if held else 0)
    swapper = WeightSwapper(
        spec.run_id,
        engine,
        lambda: registry.learner_term,
        running.change_policy,
        running.lose_policy,
        lambda: device is None or device.usable,
    )
    service = RolloutService(engine, Identity(spec.run_id, replica_id, spec.model_fingerprint), limits, metrics, swapper, running)

    health = rpc.ServingHealth(_SERVICES)

    async def publish_state() -> None:
        metrics.version.set(-1 if swapper.version is None else swapper.version)
        metrics.ready.set(service.ready)
        await health.set_ready(service.ready)

    def add(grpc_server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, grpc_server)
        WeightsService(swapper, metrics, publish_state, spec.config.security).add_to(grpc_server)

    try:
        async with AsyncExitStack() as servers:
            server = await servers.enter_async_context(
                rpc.serve(endpoint.host, endpoint.port, add, _SERVICES, security=spec.config.security, checked=health)
            )
            http_address = ""
            if endpoint.http_port is not None:
                app = make_app(
                    lambda: not engine.dead,
                    lambda: service.ready,
                    swapper.steady_version,
                    metrics,
                    lambda: engine.openai_app(spec.config.name, swapper.steady_salt),
                )
                http_port = await servers.enter_async_context(
                    serve_http(endpoint.host, endpoint.http_port, app, security=spec.config.security, names=endpoint.names)
                )
                http_address = endpoint.http_address(http_port)
            lease = Lease(
                "rollout", replica_id, endpoint.grpc_address(server.port), http_address, API_VERSION,
                {"model_fingerprint": spec.model_fingerprint, "max_model_len": engine.max_model_len,
                 "tensor_parallel": spec.config.rollout.tensor_parallel, "engine": engine.name},
            )  # fmt: skip
            if spec.follows_newest:
                await servers.enter_async_context(run.set_when_over(stop))
            turns: asyncio.Task[None] | None = None
            if device is not None:
                if await unless(stop.wait(), device.acquire()) is None:
                    return False
                if held is not None:
                    held.end_renewals()
                replica_turns = ReplicaTurns(device, engine, swapper, running, metrics, publish_state)
                turning = device.hold() if spec.config.ends_engines else replica_turns.take_turns()
                turns = asyncio.create_task(turning, name="device turns")
                servers.callback(turns.cancel)  # after the drain; the grant ends after the engine
            async with await registry.register(lease):
                logger.info(
                    "%s: gRPC at %s, HTTP at %s, %s", replica_id, lease.address, lease.http_address or "no port", engine.name
                )
                await _wait_for_stop(stop, engine, turns)
            service.drain()
            if is_wanted := turns is not None and turns.done() and not stop.is_set():
                running.fail("the learner takes the devices: continue in the next turn")
            logger.info("draining: %d running sequences have %.0f s to end", len(running), DRAIN_TIMEOUT)
            await publish_state()
            with suppress(TimeoutError):
                async with until_set(stop.orphaned), asyncio.timeout(DRAIN_TIMEOUT):
                    await running.drained()
            logger.info("drained, %d sequences are left", len(running))
            return is_wanted and not stop.is_set()
    finally:
        await redis.aclose()


async def serve_v1(engine: InferenceEngine, config: RunConfig, endpoint: Endpoint, stop: asyncio.Event) -> None:
    """Serves only the /v1 of an open engine, whose weights never change, until `stop`. Every reply names version 0. Raises
    PolyremeError when the engine has died."""

    async def version() -> int:
        return 0

    async def salt() -> str:
        return "0"

    metrics = ReplicaMetrics()
    metrics.version.set(0)
    app = make_app(
        lambda: not engine.dead, lambda: not engine.dead, version, metrics, lambda: engine.openai_app(config.name, salt)
    )
    async with serve_http(endpoint.host, endpoint.http_port or 0, app, security=config.security, names=endpoint.names) as port:
        logger.info("%s: HTTP at %s, %s", config.model.path, endpoint.http_address(port), engine.name)
        await _wait_for_stop(stop, engine)


async def _wait_for_stop(stop: asyncio.Event, engine: InferenceEngine, turns: "asyncio.Task[None] | None" = None) -> None:
    """Also returns when `turns` ends. Raises PolyremeError with a restartable exit code when the engine has died."""
    stopping, kills = asyncio.create_task(stop.wait()), MemoryKills.now()
    try:
        while not stop.is_set():
            if engine.dead:
                found = f"its processes have exited{f': {lack}' if (lack := killed_for_memory_since(kills)) else ''}"
                raise PolyremeError("the engine to run", found, "See the log above; restart the replica.")
            if turns is not None and turns.done():
                return turns.result()  # raises its error
            waited = {stopping, *([turns] if turns else [])}
            await asyncio.wait(waited, timeout=ENGINE_CHECK_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
