"""The reward service as one process.

Invariant: the service is ready exactly while its rewards can score and it does not drain. To drain, it first leaves the registry,
then refuses new items, and finally ends its processes.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from polyreme import API_VERSION
from polyreme.config.reward import RewardConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.loading import reports_to, unreported
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import serve_http
from polyreme.process.tasks import running
from polyreme_reward.build import open_rewards
from polyreme_reward.grpc_service import NAME, RewardServicer
from polyreme_reward.http_api import make_app
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.scorer import Scorer

logger = logging.getLogger(__name__)

_FOLLOW_SECONDS = 0.5

NEARBY = Endpoint()
"""Free ports on loopback."""


@dataclass(frozen=True)
class Addresses:
    """The addresses of a running service: host:port of gRPC and of HTTP, and the URL of HTTP."""

    grpc: str
    http: str
    url: str


@asynccontextmanager
async def serve(config: RewardConfig, endpoint: Endpoint = NEARBY, run: Run | None = None) -> AsyncIterator[Addresses]:
    """Loads the rewards, serves them until the block ends, then drains.

    Args:
        config: the rewards and their limits.
        endpoint: addresses to listen on. Beyond loopback, without config.security, every host that reaches the machine can call.
        run: the run to register with, or None.

    Raises:
        ConfigError: a reward cannot be loaded, a port is in use, or `security` is invalid.
        UnavailableError: loading takes longer than `start_timeout`.
    """
    assert endpoint.http_port is not None, "the reward service needs an HTTP port"
    grace = min(config.item_timeout + 1.0, 30.0)
    metrics = RewardMetrics()
    ready = [False]
    loads = unreported if run is None else reports_to(run.report)
    async with AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(open_rewards(config, metrics, loads))
        scorer = Scorer(rewards, config.queue, metrics, config.choose_by, config.choices)
        app = make_app(scorer, metrics, config.special_tokens, ready)
        http = await stack.enter_async_context(
            serve_http(endpoint.host, endpoint.http_port, app, grace, config.security, names=endpoint.names)
        )
        server = await stack.enter_async_context(
            rpc.serve(endpoint.host, endpoint.port, RewardServicer(scorer).add_to, [NAME], grace, config.security)
        )
        scheme = "https" if config.security and config.security.certificate else "http"
        reached = endpoint.http_address(http)
        addresses = Addresses(endpoint.grpc_address(server.port), reached, f"{scheme}://{reached}/")
        await server.set_ready(True)
        ready[0] = True
        try:
            async with AsyncExitStack() as registered:
                await registered.enter_async_context(running(_follow(scorer, server, ready)))
                if run is not None:
                    facts = {"rewards": [{"name": r.name, "weight": r.weight, "version": r.version} for r in rewards]}
                    lease = Lease(
                        "reward",
                        f"reward-{os.getpid()}-{uuid.uuid4().hex[:6]}",
                        addresses.grpc,
                        addresses.http,
                        API_VERSION,
                        facts,
                    )
                    await registered.enter_async_context(await Registry(run).register(lease))
                yield addresses
        finally:
            ready[0] = False
            await server.set_ready(False)
            await scorer.drain(grace)


async def _follow(scorer: Scorer, server: rpc.ServingHealth, ready: list[bool]) -> None:
    """Updates readiness from the availability of the rewards."""
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if (available := all(reward.available for reward in scorer.rewards)) != ready[0]:
            logger.warning("ready: the rewards can score again" if available else "not ready: a reward cannot score")
            ready[0] = available
            await server.set_ready(available)
