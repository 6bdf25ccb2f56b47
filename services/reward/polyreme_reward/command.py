"""`polyreme reward`: one reward server, of a run in Redis or on its own; `polyreme reward test FILE`: its rewards tried out."""

import asyncio
import gc
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from polyreme import logs
from polyreme.configfile import load_reward_config
from polyreme.errors import ConfigError
from polyreme.lifecycle import stop_event
from polyreme.redis_url import redis_option

log = logging.getLogger(__name__)


def reward(
    words: Annotated[list[str] | None, typer.Argument(metavar="[test FILE.jsonl]", help="Score a file and end.")] = None,
    redis: Annotated[str | None, redis_option("URL of the run's Redis.")] = None,
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with a `reward` section: serve it without a run.")] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to serve on; without it, this machine's on the way to Redis, or loopback without a run.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0: a free one.")] = 0,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")] = 0,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where the trainer reaches the gRPC port, when that is not where it serves: behind a proxy.",
        ),
    ] = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to be there.")] = 60.0,
) -> None:
    """Score responses, over gRPC and HTTP, with the rewards of a run or of a file."""
    logs.setup("reward")
    if words:
        _test(words, config)
        return
    if config is None and redis is None:
        raise ConfigError("--redis URL or --config FILE", "neither", "Name the run's Redis, or a YAML file to serve alone.")
    asyncio.run(_serve(redis, run, config, Place(host, port, http_port, advertise), wait))


def _test(words: list[str], config: Path | None) -> None:
    if len(words) != 2 or words[0] != "test" or config is None:
        raise ConfigError("polyreme reward test FILE.jsonl --config FILE", " ".join(words), "Write it like this.")
    from rich.console import Console

    from polyreme_reward.trial import try_rewards

    if asyncio.run(try_rewards(load_reward_config(config), Path(words[1]), Console())):
        raise typer.Exit(1)


class Place(NamedTuple):
    """Where to serve; port 0 takes a free one, host None the interface towards Redis. `advertise`: where others reach it instead."""

    host: str | None
    port: int
    http_port: int
    advertise: str | None


async def _serve(redis: str | None, run_id: str | None, path: Path | None, place: Place, wait: float) -> None:
    from polyreme_reward.server import serve

    if path is not None:
        stop = stop_event()
        async with serve(
            load_reward_config(path), place.host or "127.0.0.1", place.port, place.http_port, advertise=place.advertise
        ) as addresses:
            await _until(stop, addresses.grpc, addresses.url)
        return
    from polyreme.log.run import Run
    from polyreme.log.store import connect
    from polyreme.registry import WILDCARDS, address_towards

    client = await connect(str(redis))
    try:
        run = await Run.attach(client, run_id, wait, ended=False)
        stop = stop_event()  # until here there is nothing to end in order
        settings = (await run.config()).reward
        interface = address_towards(str(redis))
        host = place.host or interface
        advertise = place.advertise or (interface if host in WILDCARDS else None)
        following = run.telling(stop) if run_id is None else nullcontext()
        async with serve(settings, host, place.port, place.http_port, run, advertise) as addresses, following:
            await _until(stop, addresses.grpc, addresses.url)
    finally:
        await client.aclose()


async def _until(stop: asyncio.Event, grpc: str, url: str) -> None:
    gc.freeze()  # what is loaded stays: full collections need not look at it
    log.info("ready: gRPC at %s, HTTP at %s", grpc, url)
    await stop.wait()
    log.info("draining")
