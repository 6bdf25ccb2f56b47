"""The environment service as one process.

Invariant: the service is ready exactly while it can play and does not drain. To drain, it first leaves the registry, then refuses new episodes,
lets the others end for a while, and finally ends its processes.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route

from polyreme import API_VERSION
from polyreme.config.environment import EnvironmentConfig, OnlineConfig
from polyreme.errors import ConfigError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import serve_http
from polyreme_environment.agents.address import is_session_path, session_routes
from polyreme_environment.agents.agent_pool import AgentPool
from polyreme_environment.agents.runners import FunctionRunner, UrlRunner
from polyreme_environment.episode_pool import EpisodePool
from polyreme_environment.grpc_service import NAME, EnvironmentServicer
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.nemo_gym.runner import NeMoGymRunner
from polyreme_environment.online.address import online_routes
from polyreme_environment.online.pool import OnlinePool
from polyreme_environment.openenv.pool import OpenEnvPool
from polyreme_environment.pool import Pool
from polyreme_environment.verifiers.runner import VerifiersRunner

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""Maximum seconds in which running episodes may end while the server drains."""
_FOLLOW_SECONDS = 0.5

NEARBY = Endpoint()
"""Free ports on loopback."""


@asynccontextmanager
async def serve(
    config: EnvironmentConfig,
    endpoint: Endpoint = NEARBY,
    run: Run | None = None,
    grace: float = GRACE_SECONDS,
    *,
    rewarded: bool = False,
    group_size: int = 1,
) -> AsyncIterator[Lease]:
    """Loads the environment, serves it until the block ends, then drains. Yields its lease.

    Args:
        endpoint: addresses to listen on. Beyond loopback, without config.security, every host that reaches the machine can call.
        run: the run to register with, or None.
        grace: seconds in which running episodes may end.
        rewarded: whether the run's rewards score the episodes, so that an agent need not.
        group_size: that of the run.

    Raises:
        ConfigError: the environment cannot be loaded, a port is in use, or `security` is invalid.
        UnavailableError: loading takes longer than `start_timeout`.
    """
    assert endpoint.http_port is not None, "the environment service needs an HTTP port"
    metrics = EnvironmentMetrics()
    async with AsyncExitStack() as stack:
        if config.online is not None:
            pool: Pool = _online_pool(config, metrics, config.online, run, group_size)
        else:
            pool = make_pool(config, metrics, rewarded)
        stack.push_async_callback(pool.close)
        routes = session_routes(pool.sessions) if isinstance(pool, AgentPool) else []
        if isinstance(pool, OnlinePool):
            routes = [*online_routes(pool), *session_routes(pool)]
        started = asyncio.Event()
        app = make_app(lambda: started.is_set() and pool.available and not pool.draining, metrics, routes)
        is_open = is_session_path if routes else lambda path: False
        http = await stack.enter_async_context(
            serve_http(endpoint.host, endpoint.http_port, app, 5.0, config.security, is_open, names=endpoint.names)
        )
        if isinstance(pool, AgentPool):
            scheme = "https" if config.security is not None and config.security.certificate else "http"
            pool.server = f"{scheme}://{endpoint.http_address(http)}"
        await pool.start()
        version, about = pool.about
        logger.info("the environment %s: %s", version, about)
        servicer = EnvironmentServicer(pool, metrics)
        server = await stack.enter_async_context(
            rpc.serve(endpoint.host, endpoint.port, servicer.add_to, [NAME], grace, config.security)
        )
        started.set()
        await server.set_ready(True)
        name = f"environment-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        facts = {"episodes": config.episodes, "version": version}
        lease = Lease("environment", name, endpoint.grpc_address(server.port), endpoint.http_address(http), API_VERSION, facts)
        try:
            async with AsyncExitStack() as registered:
                registered.push_async_callback(_end, asyncio.create_task(_follow(pool, server)))
                if run is not None:
                    await registered.enter_async_context(await Registry(run).register(lease))
                yield lease
        finally:
            pool.draining = True
            await server.set_ready(False)


def make_pool(config: EnvironmentConfig, metrics: EnvironmentMetrics, rewarded: bool) -> Pool:
    """What plays the episodes of a configuration. `rewarded`: see `serve`."""
    if config.openenv:
        return OpenEnvPool(config, metrics)
    if config.verifiers is not None:
        return AgentPool(config, metrics, VerifiersRunner(config, metrics), rewarded)
    if config.nemo_gym is not None:
        return AgentPool(config, metrics, NeMoGymRunner(config, metrics), rewarded)
    if config.url is not None:
        return AgentPool(config, metrics, UrlRunner(config.url), rewarded)
    if config.function is not None:
        return AgentPool(config, metrics, FunctionRunner(config, metrics), rewarded)
    return EpisodePool(config, metrics)


def _online_pool(
    config: EnvironmentConfig, metrics: EnvironmentMetrics, settings: OnlineConfig, run: Run | None, group_size: int
) -> OnlinePool:
    """Raises ConfigError without a run, which keeps the sessions, or without the key."""
    key = os.environ.get(settings.key_env, "").strip()
    if run is None or not key:
        found = "no run" if run is None else "it is empty or not set"
        raise ConfigError(
            f"a run, and the key of its product in the environment variable {settings.key_env} (environment.online.key_env)",
            found,
            "Set it; under `polyreme up`, the key is in RUN_DIR/online/key.",
        )
    return OnlinePool(config, metrics, settings, run, key, grouped=group_size > 1)


def make_app(ready: Callable[[], bool], metrics: EnvironmentMetrics, routes: Sequence[Route] = ()) -> FastAPI:
    """The HTTP application: /health, /ready, /metrics, and `routes`."""
    app = FastAPI(title="Polyreme environments", routes=[*routes])

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def is_ready() -> Response:
        good = ready()
        return JSONResponse({"status": "ok" if good else "no episode can be played"}, status_code=200 if good else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _follow(pool: Pool, server: rpc.Server) -> None:
    """Updates readiness from the availability of the workers."""
    ready = True
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if pool.available != ready:
            ready = pool.available
            logger.warning("ready: a worker can play again" if ready else "not ready: no worker can play")
            await server.set_ready(ready)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
