"""A running gateway of one run.

Invariant: the gateway requires of its callers the token and the certificates that the run's services require, and presents its own to
the replicas.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from polyreme.experience.run import Run
from polyreme.gateway.app import make_app
from polyreme.gateway.client import ReplicaHttp
from polyreme.gateway.forward import Forwarder, GatewayLimits
from polyreme.gateway.metrics import GatewayMetrics
from polyreme.gateway.names import ModelNames, parse_aliases
from polyreme.gateway.replicas import ReplicaTable
from polyreme.gateway.reply import server_error_body
from polyreme.net.http_server import serve_http

DRAIN_TIMEOUT = 20.0


@asynccontextmanager
async def serve_gateway(run: Run, host: str, port: int, aliases: Sequence[str], limits: GatewayLimits) -> AsyncIterator[int]:
    """Serves a run's /v1 until the block ends. Yields the port.

    Args:
        host, port: address to bind; port 0 takes a free one.
        aliases: see `parse_aliases`.

    Raises:
        ConfigError: an alias, the port, or the run's security settings cannot be used.
    """
    config = await run.config()
    names = ModelNames(config.name, parse_aliases(aliases, config.name))
    metrics = GatewayMetrics()
    async with ReplicaHttp(config.security, limits.requests) as http:
        table = ReplicaTable(run, http)
        app = make_app(names, table, Forwarder(names, table, http, metrics, limits), metrics)
        await table.refresh()
        serving = asyncio.current_task()
        assert serving is not None
        following = asyncio.create_task(table.keep_current(), name="replicas of the gateway")
        following.add_done_callback(lambda task: None if task.cancelled() else serving.cancel())  # a bug ends the block
        try:
            async with serve_http(host, port, app, DRAIN_TIMEOUT, config.security, error_body=server_error_body) as bound:
                yield bound
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
