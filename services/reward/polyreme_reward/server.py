"""The service as one process. Invariant: it is ready exactly while its rewards are loaded and it is not on its way out; on the way
out it leaves the registry first, refuses new items next, and ends its processes last."""

import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from polyreme import API_VERSION, rpc
from polyreme.config import RewardConfig
from polyreme.log.run import Run
from polyreme.registry import WILDCARDS, Lease, Registry
from polyreme_reward.build import open_rewards
from polyreme_reward.grpc_service import NAME, RewardServicer
from polyreme_reward.http_api import make_app
from polyreme_reward.http_server import serve_http
from polyreme_reward.metrics import Metrics
from polyreme_reward.scorer import Scorer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Addresses:
    """Where a running service listens, as others reach it: host:port of both, and HTTP's as a URL."""

    grpc: str
    http: str
    url: str


@asynccontextmanager
async def serve(
    config: RewardConfig,
    host: str = "127.0.0.1",
    port: int = 0,
    http_port: int = 0,
    run: Run | None = None,
    advertise: str | None = None,
) -> AsyncIterator[Addresses]:
    """Loads the rewards and serves them until the block ends, then drains.

    Args:
        config: the rewards and their limits.
        host: the address to bind; beyond loopback, without config.security, everyone who reaches the machine may call.
        port: of gRPC; 0 takes a free one.
        http_port: of HTTP; 0 takes a free one.
        run: where to register; None: nowhere.
        advertise: where others reach it instead: a host, or host:port of gRPC; None: `host`, or of a wildcard this machine's name.

    Raises:
        ConfigError: a reward cannot be loaded, a port is taken, `security` cannot be used. UnavailableError: loading takes too long.
    """
    grace = min(config.item_timeout + 1.0, 30.0)
    metrics = Metrics()
    ready = [False]
    async with AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(open_rewards(config, metrics))
        scorer = Scorer(rewards, config.queue, metrics, config.choose_by)
        app = make_app(scorer, metrics, config.special_tokens, ready)
        http = await stack.enter_async_context(serve_http(host, http_port, app, grace, config.security))
        server = await stack.enter_async_context(
            rpc.serve(host, port, RewardServicer(scorer).add_to, [NAME], grace, config.security)
        )
        name, _, reached = (advertise or "").partition(":")
        name = name or (socket.gethostname() if host in WILDCARDS else host)
        scheme = "https" if config.security and config.security.certificate else "http"
        addresses = Addresses(f"{name}:{reached or server.port}", f"{name}:{http}", f"{scheme}://{name}:{http}/")
        await server.set_ready(True)
        ready[0] = True
        try:
            async with AsyncExitStack() as registered:
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
