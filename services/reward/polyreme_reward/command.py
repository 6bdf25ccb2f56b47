"""`polyreme reward` serves the rewards of a run in Redis or of a file; `polyreme reward test FILE` scores a file with them.

Invariant: from the first signal on, the server drains before it ends.
"""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.load import data_columns, load_reward_config
from polyreme.errors import ConfigError
from polyreme.net.endpoint import Advertise, Endpoint, Host, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.lifecycle import stop_event

log = logging.getLogger(__name__)


def reward(
    words: Annotated[list[str] | None, typer.Argument(metavar="[test FILE.jsonl]", help="Score a file and exit.")] = None,
    redis: Annotated[str | None, redis_option("URL of the run's Redis.")] = None,
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with a `reward` section: serve it without a run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run.")] = 60.0,
) -> None:
    """Score responses, over gRPC and HTTP, with the rewards of a run or of a file."""
    logging_setup.setup("reward")
    if words:
        _test(words, config)
        return
    if config is None and redis is None:
        raise ConfigError("--redis URL or --config FILE", "neither", "Name the run's Redis, or a YAML file to serve alone.")
    asyncio.run(_serve(redis, run, config, partial(endpoint_of, host, port, http_port, advertise), wait))


def _test(words: list[str], config: Path | None) -> None:
    if len(words) != 2 or words[0] != "test" or config is None:
        raise ConfigError("polyreme reward test FILE.jsonl --config FILE", " ".join(words), "Use this form.")
    from rich.console import Console

    from polyreme_reward.reward_test import test_rewards

    if asyncio.run(test_rewards(load_reward_config(config), Path(words[1]), Console(), data_columns(config))):
        raise typer.Exit(1)


async def _serve(
    redis: str | None, run_id: str | None, path: Path | None, endpoint_towards: Callable[[str | None], Endpoint], wait: float
) -> None:
    from polyreme_reward.isolation.privacy import refuse_inspection
    from polyreme_reward.server import serve

    refuse_inspection()  # its memory and environment hold the run's password and token
    if path is not None:
        stop = stop_event()
        async with serve(load_reward_config(path), endpoint_towards(None)) as addresses:
            await _until(stop, addresses.grpc, addresses.url)
        return
    from polyreme.experience.run import Run
    from polyreme.experience.store import connect

    client = await connect(str(redis))
    try:
        run = await Run.attach(client, run_id, wait, ended=False)
        stop = stop_event()  # no graceful shutdown is needed before this point
        settings = (await run.config()).reward
        following = run.telling(stop) if run_id is None else nullcontext()
        async with serve(settings, endpoint_towards(redis), run) as addresses, following:
            await _until(stop, addresses.grpc, addresses.url)
    finally:
        await client.aclose()


async def _until(stop: asyncio.Event, grpc: str, url: str) -> None:
    gc.freeze()  # loaded modules stay: full collections need not scan them
    log.info("ready: gRPC at %s, HTTP at %s", grpc, url)
    await stop.wait()
    log.info("draining")
