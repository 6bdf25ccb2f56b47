"""gRPC in one place: every server has health and reflection, every channel the same limits and keepalive.

A server is not ready until its owner says so, and a call never waits without a deadline: the callers pass `timeout` on each.
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core writes to stderr what our errors already say
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from polyreme.errors import ConfigError

_MAX_MESSAGE_BYTES = 32 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    *_CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a taken port is silently shared
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class Server:
    """A serving gRPC server."""

    def __init__(self, port: int, servicer: health.aio.HealthServicer, services: Sequence[str]) -> None:
        self.port = port
        self._health = servicer
        self._services = services

    async def set_ready(self, ready: bool) -> None:
        """Answers SERVING, or NOT_SERVING, to health checks of the whole and of each service."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (health.OVERALL_HEALTH, *self._services):
            await self._health.set(name, status)


@asynccontextmanager
async def serve(
    host: str, port: int, add: Callable[[grpc.aio.Server], None], service_names: Sequence[str], grace: float = 5.0
) -> AsyncIterator[Server]:
    """Serves until the block ends, then refuses new calls and gives running ones `grace` seconds.

    Args:
        host: the address to bind.
        port: 0 takes a free one; the result's `port` tells which.
        add: registers the servicers.
        service_names: full names, for health and reflection.
        grace: seconds for calls under way at the end.

    Raises:
        ConfigError: the port is taken or the address cannot be bound.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add(server)
    reflection.enable_server_reflection((*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server)  # fmt: skip
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"a free port {port} on {host} for gRPC", str(error).split(";")[0], "Choose another port, or end its owner."
        ) from None
    running = Server(bound, servicer, service_names)
    await running.set_ready(False)
    await server.start()
    try:
        yield running
    finally:
        await servicer.enter_graceful_shutdown()
        await server.stop(grace)


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`. Close it; give every call a `timeout`."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
