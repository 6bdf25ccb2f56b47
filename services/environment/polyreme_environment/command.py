"""`polyreme environment` serves the environment of a run.

Invariant: after the first signal the server drains before it ends.
"""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Annotated

import typer

from polyreme.errors import ConfigError
from polyreme.net.endpoint import Advertise, Endpoint, Host, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import stop_event, until_set

logger = logging.getLogger(__name__)


def environment(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id. Default: the newest run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Maximum seconds to wait for the run.")] = 60.0,
) -> None:
    """Play the episodes of a run's environment over gRPC."""
    logging_setup.setup("environment")
    run_service(_serve(redis, run, partial(endpoint_of, host, port, http_port, advertise), wait))


async def _serve(redis: str, run_id: str | None, endpoint_towards: Callable[[str | None], Endpoint], wait: float) -> None:
    from polyreme.experience.run import Run
    from polyreme.experience.store import connect
    from polyreme.isolation.privacy import refuse_inspection
    from polyreme_environment.server import serve

    refuse_inspection()  # memory and environment contain the run's password and token
    client = await connect(redis)
    try:
        run = await Run.attach(client, run_id, wait, ended=False)
        stop = stop_event()  # no graceful shutdown is needed before this point
        following = run.set_when_over(stop) if run_id is None else nullcontext()
        async with until_set(stop):
            settings = (await run.config()).environment
            if settings is not None:
                async with serve(settings, endpoint_towards(redis), run) as lease, following:
                    gc.freeze()  # excludes loaded modules from garbage collections
                    logger.info("ready: gRPC at %s, HTTP at %s", lease.address, lease.http_address)
                    try:
                        await asyncio.Event().wait()
                    finally:
                        logger.info("draining")
            elif run_id is not None:
                raise ConfigError(f"a section `environment` in run {run.run_id}", "none", "Start no environment service for it.")
            else:
                # A container starts before it knows the run, and would be restarted for ever.
                logger.info("run %s has no environment; waiting for its end", run.run_id)
                async with following:
                    await stop.wait()
    finally:
        await client.aclose()
