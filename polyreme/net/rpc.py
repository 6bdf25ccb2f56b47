"""gRPC servers and channels. Every server has health and reflection, every channel the same limits and keepalive.

Invariant: a server is not ready until its owner sets it ready, and holds no more connections than its process can afford. Callers
pass a `timeout` with every call. With a SecurityConfig, only health checks are answered without the token.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.net import tls as secure
from polyreme.net.ports import affordable_connections, join

PENDING_CALLS = 1 << 14
"""Maximum number of calls that a server has not begun. gRPC itself cancels some of them beyond 1,000, and all beyond 3,000 or
after 30 s, without a word; more episodes than that may begin at once. A service refuses by its own bounds, and says so."""
MAX_MESSAGE_BYTES = 32 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),  # fewer frames halve the work of a weight stream
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # otherwise two servers share a port silently
    ("grpc.http2.max_ping_strikes", 0),  # else pings end a connection without data after 80 s, or after a standstill
    ("grpc.server_handshake_timeout_ms", 20_000),  # a connection that never speaks is closed
    ("grpc.server.max_pending_requests", PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", 600),  # seconds that a call may wait to begin; its caller has a deadline
)


class ServingHealth:
    """The health of a server and of its services, which its health checks answer. port: that it serves; 0 before."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.servicer, self.port = health.aio.HealthServicer(), 0
        self._names = (health.OVERALL_HEALTH, *service_names)

    async def set_ready(self, ready: bool) -> None:
        """Sets the health of the server and of each service to SERVING or NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)


@asynccontextmanager
async def serve(
    host: str,
    port: int,
    add: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    grace: float = 5.0,
    security: SecurityConfig | None = None,
    checked: ServingHealth | None = None,
    connections: int | None = None,
) -> AsyncIterator[ServingHealth]:
    """Serves until the block ends, then refuses new calls and lets running ones finish for `grace` seconds.

    Args:
        host: the address to bind.
        port: 0 takes a free one; see the result's `port`.
        add: registers the servicers.
        service_names: full names, for health and reflection.
        grace: seconds for running calls at the end.
        security: TLS and token; None: plain.
        checked: the health of these services, for a servicer that changes it; None: of the result.
        connections: open at the same time; more are closed at once. None: an eighth of the files that the process may open.

    Raises:
        ConfigError: the port is in use, the address cannot be bound, or the files or token of `security` cannot be used.
    """
    credentials = secure.server_credentials(security) if security else None
    token = secure.token(security) if security else None
    interceptors: list[grpc.aio.ServerInterceptor] = [_Decoding()] if token is None else [_Bearer(token), _Decoding()]
    # Few clients connect, each by one connection. The others that the process can afford are for HTTP and its own files.
    most = max(8, affordable_connections() // 6) if connections is None else connections
    limit = ("grpc.max_allowed_incoming_connections", most)
    server = grpc.aio.server(options=(*SERVER_OPTIONS, limit), interceptors=interceptors)
    checked = checked or ServingHealth(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(checked.servicer, server)
    add(server)
    reflection.enable_server_reflection(
        (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server
    )
    try:
        place = join(host, port)
        bound = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    except RuntimeError as error:
        raise ConfigError(
            f"a free port {port} on {host} for gRPC",
            str(error).split(";")[0],
            "Choose another port or host, or stop the process that uses it.",
        ) from None
    checked.port = bound
    await checked.set_ready(False)
    await server.start()
    try:
        yield checked
    finally:
        await checked.servicer.enter_graceful_shutdown()
        await server.stop(grace)


def connect(address: str, security: SecurityConfig | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`. The caller closes it; calls need a `timeout`. Raises ConfigError for unusable files or token."""
    if security is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    if security.certificate is None:
        return _bearing(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), secure.token(security) or "")
    name = (("grpc.ssl_target_name_override", security.server_name),) if security.server_name else ()
    return grpc.aio.secure_channel(address, secure.channel_credentials(security), options=(*CHANNEL_OPTIONS, *name))


def channel_closed() -> bool:
    """Whether the current CancelledError means that a channel was closed under its call, rather than a cancelled task."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def _bearing(channel: grpc.aio.Channel, token: str) -> grpc.aio.Channel:
    """The channel, whose calls carry the token from now on: without TLS gRPC itself sends none."""
    header = (("authorization", f"Bearer {token}"),)

    def with_header(make: Callable[..., Callable[..., grpc.aio.Call]]) -> Callable[..., object]:
        def method(*arguments: object, **keywords: object) -> Callable[..., grpc.aio.Call]:
            call = make(*arguments, **keywords)

            def bearing(*arguments: object, metadata: grpc.aio.Metadata | None = None, **keywords: object) -> grpc.aio.Call:
                return call(*arguments, metadata=(*(metadata or ()), *header), **keywords)

            return bearing

        return method

    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, with_header(getattr(channel, kind)))
    return channel


_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class _Bearer(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without the token, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "expected `authorization: Bearer TOKEN` with this service's token"
            )

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        headers = dict(details.invocation_metadata or ())
        given = str(headers.get("authorization", "")).encode("utf-8", "replace")
        if details.method.startswith("/grpc.health.v1.") or secure.authorized(given, self._token):
            return await continuation(details)
        return self._refuse


class _Decoding(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to undecodable requests, where gRPC would log a traceback and answer UNKNOWN."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if (known := self._wrapped.get(details.method)) is not None:
            return known
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.response_streaming or handler.request_deserializer is None:
            return handler
        wrapped = self._wrapped[details.method] = _decoding(handler)
        return wrapped


def _decoding(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    def deserialize(data: bytes) -> Message | DecodeError:
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            return error

    async def answer(request: Message | DecodeError, context: grpc.aio.ServicerContext) -> Message:
        if isinstance(request, DecodeError):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"expected a message of this method; found other bytes ({request})"
            )
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(answer, deserialize, handler.response_serializer)
