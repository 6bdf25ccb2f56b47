"""Leads one launch of a learner on several machines: `python -m polyreme_trainer.launch`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from polyreme.experience.listing import attached
from polyreme.experience.store import RECONNECT_TIMEOUT
from polyreme.net.endpoint import address_towards
from polyreme.net.ports import free_port, join
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error
from polyreme_trainer.launch.leader_node import lead

_ATTACH_SECONDS = 10.0


def machines(
    ranks: Annotated[list[str], typer.Argument(help="What Python runs as a learner rank.")],
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str, typer.Option(envvar="POLYREME_RUN", help="Run id.")],
    log_dir: Annotated[Path, typer.Option(help="Directory of the other machines' logs.")],
    host: Annotated[str | None, typer.Option(help="Address at which the other machines reach this one.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the rendezvous; 0: a free one.")] = 0,
) -> None:
    """Leads one launch of a learner on several machines."""
    logging_setup.setup("learner")

    async def once() -> int:
        async with attached(redis, run, _ATTACH_SECONDS, RECONNECT_TIMEOUT) as found:
            own = host or address_towards(redis)
            endpoint = join(own, port or free_port("::" if ":" in own else "0.0.0.0"))
            return await lead(found, await found.config(), redis, endpoint, log_dir, ranks)

    with exit_on_error("learner"):
        sys.exit(asyncio.run(once()))


if __name__ == "__main__":
    typer.run(machines)
