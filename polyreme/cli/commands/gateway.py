"""`polyreme gateway`: one OpenAI-compatible address for all replicas of a run.

Invariant: it reads the run's Redis and changes nothing in it.
"""

import logging
from typing import Annotated

import typer

from polyreme.experience.listing import service_run
from polyreme.gateway.limits import GatewayLimits
from polyreme.gateway.serve import serve_gateway
from polyreme.net.endpoint import endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service

logger = logging.getLogger("polyreme.gateway")

PORT = 8440
_REDIS_TIMEOUT = 2.0  # during this time, replicas are polled with the last known leases


def gateway(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; default: the newest run.")] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VERSION]", help="A further model name: for a version, for `latest`, or for any. Repeatable."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to bind. Default: this machine's address towards Redis.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")] = PORT,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests. Further ones get 429.")] = 256,
    timeout: Annotated[float, typer.Option(min=1, help="Maximum seconds from a request to the end of its reply.")] = 600.0,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to start.")] = 60.0,
) -> None:
    """Serve one OpenAI-compatible /v1 for all replicas of a run."""
    logging_setup.setup("gateway")
    run_service(_serve(redis, run, alias or [], host, port, GatewayLimits(max_requests, timeout), wait))


async def _serve(
    redis_url: str, run_id: str | None, aliases: list[str], host: str | None, port: int, limits: GatewayLimits, wait: float
) -> None:
    async with service_run(redis_url, run_id, wait, _REDIS_TIMEOUT) as (run, stop):
        endpoint = endpoint_of(host, 0, port, None, redis_url)
        async with serve_gateway(run, endpoint.host, port, aliases, limits) as bound:
            scheme = "https" if (security := (await run.config()).security) and security.certificate else "http"
            logger.info("ready: run %s at %s://%s/v1", run.run_id, scheme, endpoint.http_address(bound))
            await stop.wait()
            logger.info("draining")
