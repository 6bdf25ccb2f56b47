"""The environment service as one process.

Invariant: the service is ready exactly while it can play and does not drain. To drain, it first leaves the registry, then refuses
new episodes, lets the others end for a while, and finally ends its processes.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route

from polyreme import API_VERSION
from polyreme.config.environment import EnvironmentConfig, OnlineConfig
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import serve_http
from polyreme.process.tasks import running
from polyreme_environment.agents.address import Find, OpenSession, is_session_path, session_routes
from polyreme_environment.agents.agent_pool import AgentPool
from polyreme_environment.agents.request import RefusedRequestError
from polyreme_environment.agents.runners import FunctionRunner, Runner, UrlRunner
from polyreme_environment.agents.session_table import SessionTable
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


@dataclass(frozen=True)
class Hosted:
    """An environment that a server hosts.

    Attributes:
        rewarded: whether the run's rewards score its episodes, so that an agent need not.
    """

    config: EnvironmentConfig
    rewarded: bool = False


def hosted_by(config: RunConfig) -> dict[str, Hosted]:
    """The environments of a run by name, as its servers host them."""
    own = {each.name: each.is_rewarded for each in config.eval_sets if each.environment is not None}
    rewarded = {"": config.reward is not None} | own
    return {name: Hosted(section, rewarded[name]) for name, section in config.environments.items()}


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
    """`serve_all` of a run's environment alone."""
    async with serve_all({"": Hosted(config, rewarded)}, endpoint, run, grace, group_size=group_size) as lease:
        yield lease


@asynccontextmanager
async def serve_all(
    hosted: Mapping[str, Hosted],
    endpoint: Endpoint = NEARBY,
    run: Run | None = None,
    grace: float = GRACE_SECONDS,
    *,
    group_size: int = 1,
) -> AsyncIterator[Lease]:
    """Loads environments, serves them until the block ends, then drains. Yields the lease.

    Args:
        hosted: at least one environment, by name; all have the same `security`.
        endpoint: addresses to listen on. Beyond loopback, without `security`, every host that reaches the machine can call.
        run: the run to register with, or None.
        grace: seconds in which running episodes may end.
        group_size: that of the run.

    Raises:
        ConfigError: an environment cannot be loaded, a port is in use, or `security` is invalid.
        UnavailableError: loading takes longer than `start_timeout`.
    """
    assert endpoint.http_port is not None, "the environment service needs an HTTP port"
    metrics, sessions, security = EnvironmentMetrics(), SessionTable(), next(iter(hosted.values())).config.security
    async with AsyncExitStack() as stack:
        pools: dict[str, Pool] = {}
        for name, each in hosted.items():
            online = each.config.online
            if online is not None:
                pools[name] = _online_pool(each.config, metrics, online, run, group_size)
            else:
                pools[name] = _make_pool(each, metrics, sessions)
            stack.push_async_callback(pools[name].close)
        routes: list[Route] = []
        for pool in pools.values():
            if isinstance(pool, OnlinePool):  # the others are of held-out sets
                routes = [*online_routes(pool), *session_routes(_either(sessions.find, pool.find))]
                break
            if isinstance(pool, AgentPool):
                routes = session_routes(sessions.find)
        started = asyncio.Event()
        app = make_app(lambda: started.is_set() and _plays(pools), metrics, routes)
        is_open = is_session_path if routes else lambda path: False
        http = await stack.enter_async_context(
            serve_http(endpoint.host, endpoint.http_port, app, 5.0, security, is_open, names=endpoint.names)
        )
        scheme = "https" if security is not None and security.certificate else "http"
        for pool in pools.values():
            if isinstance(pool, AgentPool):
                pool.server = f"{scheme}://{endpoint.http_address(http)}"
        starting = await stack.enter_async_context(running(*(pool.start() for pool in pools.values())))
        await asyncio.gather(*starting)
        for name, pool in pools.items():
            version, about = pool.about
            logger.info("the environment %s%s: %s", f"of the set {name}, " if name else "", version, about)
        servicer = EnvironmentServicer(pools, metrics, sum(each.config.episodes for each in hosted.values()))
        server = await stack.enter_async_context(
            rpc.serve(endpoint.host, endpoint.port, servicer.add_to, [NAME], grace, security)
        )
        started.set()
        await server.set_ready(True)
        lease = Lease(
            "environment",
            f"environment-{os.getpid()}-{uuid.uuid4().hex[:6]}",
            endpoint.grpc_address(server.port),
            endpoint.http_address(http),
            API_VERSION,
            {
                "episodes": {name: each.config.episodes for name, each in hosted.items()},
                "versions": {name: pool.about[0] for name, pool in pools.items()},
            },
        )
        try:
            async with AsyncExitStack() as registered:
                await registered.enter_async_context(running(_follow(pools, server)))
                if run is not None:
                    await registered.enter_async_context(await Registry(run).register(lease))
                yield lease
        finally:
            for pool in pools.values():
                pool.draining = True
            servicer.drain()
            await server.set_ready(False)


def _either(agents: Find, product: Find) -> Find:
    """Finds a session of agents, or else one of a running product."""

    def find(key: str, id: str | None) -> OpenSession:
        try:
            return agents(key, id)
        except RefusedRequestError:
            return product(key, id)

    return find


def _plays(pools: Mapping[str, Pool]) -> bool:
    """Whether each environment can play."""
    return all(pool.available and not pool.draining for pool in pools.values())


def _make_pool(hosted: Hosted, metrics: EnvironmentMetrics, sessions: SessionTable) -> Pool:
    """What plays the episodes of an environment. `sessions`: the open ones of the server."""
    config = hosted.config
    if config.openenv:
        return OpenEnvPool(config, metrics)
    if not config.is_agent:
        return EpisodePool(config, metrics)
    return AgentPool(config, metrics, _runner(config, metrics), sessions, hosted.rewarded)


def _runner(config: EnvironmentConfig, metrics: EnvironmentMetrics) -> Runner:
    """What runs an agent."""
    if config.verifiers is not None:
        return VerifiersRunner(config, metrics)
    if config.nemo_gym is not None:
        return NeMoGymRunner(config, metrics)
    return FunctionRunner(config, metrics) if config.url is None else UrlRunner(config.url)


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


async def _follow(pools: Mapping[str, Pool], server: rpc.ServingHealth) -> None:
    """Updates readiness from the availability of the workers."""
    ready = True
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if (now := all(pool.available for pool in pools.values())) != ready:
            ready = now
            logger.warning("ready: a worker can play again" if ready else "not ready: no worker can play")
            await server.set_ready(ready)
