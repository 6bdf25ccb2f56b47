"""A replica's life: what it must know from Redis, the engine, the servers, the lease; and the same backwards.

Kept here: the lease exists only while calls are answered. On a signal the lease goes first, then new calls are refused, slots
under way get their time, and then the engine ends.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polyreme import API_VERSION, logs
from polyreme.config import RunConfig
from polyreme.errors import UnavailableError
from polyreme.log.run import Run
from polyreme.log.store import connect
from polyreme.registry import Lease, LeaseKeeper, Registry
from polyreme_rollout.scratch import scratch_directory

FIND_RUN_SECONDS = 60.0
DRAIN_SECONDS = 20.0
WATCH_SECONDS = 0.5
QUEUED_PER_RUNNING = 16  # slots taken per slot that can be decoded at once

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where to serve; port 0 takes a free one."""

    host: str
    port: int
    http_port: int


@dataclass(frozen=True)
class Orders:
    """What the run record says to a replica."""

    run_id: str
    config: RunConfig
    model_files: dict[str, bytes]
    model_fingerprint: str


def serve_replica(redis_url: str, run_id: str | None, place: Place) -> None:
    """Runs a replica until SIGTERM or SIGINT.

    Raises:
        StoreError, UnavailableError, ConfigError: see their messages.
    """
    logs.setup("rollout")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the loop has its own: leave files tidy
    _check_ports(place)
    orders = asyncio.run(_fetch(redis_url, run_id))
    with scratch_directory() as directory:
        # vLLM leaves its sockets and rendezvous files behind: they go with ours.
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        (model_dir := directory / "model").mkdir()
        for name, data in orders.model_files.items():
            (model_dir / Path(name).name).write_bytes(data)
        from polyreme_rollout.engine.vllm import start

        engine = start(orders.config, model_dir)
        try:
            asyncio.run(_serve(engine, orders, redis_url, place))
        finally:
            engine.close()


async def _fetch(redis_url: str, run_id: str | None) -> Orders:
    redis = await connect(redis_url)
    try:
        run = await Run.attach(redis, run_id, FIND_RUN_SECONDS)
        return Orders(run.run_id, await run.config(), await run.model_files(), await run.model_fingerprint())
    finally:
        await redis.aclose()


async def _serve(engine: Any, orders: Orders, redis_url: str, place: Place) -> None:
    from polyreme import lifecycle, rpc
    from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
    from polyreme_rollout import http
    from polyreme_rollout.metrics import Metrics
    from polyreme_rollout.requests import Limits
    from polyreme_rollout.service import Identity, RolloutService
    from polyreme_rollout.swap import Swapper
    from polyreme_rollout.weights_service import WeightsService

    stop = lifecycle.stop_event()
    await engine.open()
    redis = await connect(redis_url)
    run = Run(redis, orders.run_id)
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
        weights = WeightsService(swapper, metrics, announce)
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(weights, grpc_server)

    names = [module.DESCRIPTOR.services_by_name[name].full_name for module, name in
             ((rollout_pb2, "RolloutService"), (weights_pb2, "WeightsService"))]  # fmt: skip
    app = http.make_app(lambda: not engine.dead, lambda: service.ready, metrics, lambda: engine.openai_app(orders.config.name))
    try:
        async with (
            rpc.serve(place.host, place.port, add, names) as server,
            http.serve(app, http.bind(place.host, place.http_port)) as http_port,
        ):
            host = _advertised(place.host, redis_url)
            lease = Lease(
                "rollout", replica_id, f"{host}:{server.port}", f"{host}:{http_port}", API_VERSION,
                {"model_fingerprint": orders.model_fingerprint, "max_model_len": engine.max_model_len,
                 "tensor_parallel": orders.config.rollout.tensor_parallel, "engine": engine.name},
            )  # fmt: skip
            async with await Registry(run).register(lease) as keeper:
                log.info("%s: gRPC at %s, HTTP at %s, %s", replica_id, lease.address, lease.http_address, engine.name)
                lifecycle.settle()
                await _until_stopped(stop, engine)
            service.draining = True
            await announce()
            with suppress(TimeoutError):
                await asyncio.wait_for(service.drained(), DRAIN_SECONDS)
    finally:
        await redis.aclose()


async def _until_stopped(stop: asyncio.Event, engine: Any) -> None:
    """Raises UnavailableError when the engine is gone."""
    while not stop.is_set():
        if engine.dead:
            raise UnavailableError(
                "vLLM's engine to run", "its processes are gone", "See the log above; start the replica again."
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_SECONDS)


def _check_ports(place: Place) -> None:
    """A taken port is found before the engine's start, not after. Raises ConfigError."""
    from polyreme_rollout import http

    for port in {place.port, place.http_port} - {0}:
        http.bind(place.host, port).close()


def _advertised(host: str, redis_url: str) -> str:
    """The address that others reach this replica at: of a wildcard, the interface that leads to Redis."""
    if host not in ("0.0.0.0", "::"):
        return host
    redis = urlsplit(redis_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((redis.hostname or "127.0.0.1", redis.port or 6379))  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])
