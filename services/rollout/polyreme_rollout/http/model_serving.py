"""Serves the /v1 of an engine whose weights never change.

Invariant: the server has only an HTTP port and belongs to no run. Every reply names version 0.
"""

import asyncio
import logging

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import serve_http
from polyreme_rollout.engine.protocol import InferenceEngine
from polyreme_rollout.http.http_app import make_app
from polyreme_rollout.metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

_VERSION = 0
_ENGINE_CHECK_SECONDS = 0.5


async def serve_v1(engine: InferenceEngine, config: RunConfig, endpoint: Endpoint, stop: asyncio.Event) -> None:
    """Serves an open engine until `stop`. Raises PolyremeError when the engine has died."""

    async def version() -> int:
        return _VERSION

    async def salt() -> str:
        return str(_VERSION)

    metrics = ReplicaMetrics()
    metrics.version.set(_VERSION)
    app = make_app(
        lambda: not engine.dead, lambda: not engine.dead, version, metrics, lambda: engine.openai_app(config.name, salt)
    )
    async with serve_http(endpoint.host, endpoint.http_port or 0, app, security=config.security, names=endpoint.names) as port:
        logger.info("%s: HTTP at %s, %s", config.model.path, endpoint.http_address(port), engine.name)
        while not stop.is_set():
            if engine.dead:
                raise PolyremeError("the engine to run", "its processes have exited", "See the log above; start it again.")
            try:
                async with asyncio.timeout(_ENGINE_CHECK_SECONDS):
                    await stop.wait()
            except TimeoutError:
                continue
