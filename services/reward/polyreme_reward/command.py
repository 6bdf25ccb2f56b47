"""`polyreme reward` serves the rewards of a run in Redis or of a YAML file. `polyreme reward test FILE` scores a file with them.

Invariant: after the first signal the server drains before it ends.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.load import data_columns, load_reward_config
from polyreme.errors import ConfigError
from polyreme.hub.resolve import resolve_section
from polyreme.net.endpoint import Advertise, Endpoint, Host, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service, stay
from polyreme.process.lifecycle import stop_event, until_set

logger = logging.getLogger(__name__)


def reward(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[test FILE.jsonl]", help="Score the responses of a file and exit.")
    ] = None,
    redis: Annotated[str | None, redis_option("URL of the run's Redis.")] = None,
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id. Default: the newest run.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with a `reward` section to serve without a run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Maximum seconds to wait for the run.")] = 60.0,
) -> None:
    """Serve the rewards of a run or of a file over gRPC and HTTP."""
    logging_setup.setup("reward")
    if words:
        _test(words, config)
        return
    if config is None and redis is None:
        raise ConfigError(
            "--redis URL or --config FILE", "neither", "Pass the run's Redis, or a YAML file to serve without a run."
        )
    run_service(_serve(redis, run, config, partial(endpoint_of, host, port, http_port, advertise), wait))


def _test(words: list[str], config: Path | None) -> None:
    if len(words) != 2 or words[0] != "test" or config is None:
        raise ConfigError("polyreme reward test FILE.jsonl --config FILE", " ".join(words), "Use this form.")
    from rich.console import Console

    from polyreme_reward.reward_test import test_rewards

    rewards = resolve_section(load_reward_config(config), "reward")
    if asyncio.run(test_rewards(rewards, Path(words[1]), Console(), data_columns(config))):
        raise typer.Exit(1)


async def _serve(
    redis: str | None, run_id: str | None, path: Path | None, endpoint_towards: Callable[[str | None], Endpoint], wait: float
) -> None:
    from polyreme.isolation.privacy import refuse_inspection
    from polyreme_reward.server import serve

    refuse_inspection()  # memory and environment contain the run's password and token
    if path is not None:
        settings = await asyncio.to_thread(resolve_section, load_reward_config(path), "reward")
        async with until_set(stop_event()), serve(settings, endpoint_towards(None)) as addresses:
            await stay(addresses.grpc, addresses.url)
        return
    from polyreme.experience.listing import service_run

    async with service_run(str(redis), run_id, wait) as (run, stop), until_set(stop):
        config = await run.config()
        if config.reward is not None:
            settings = await asyncio.to_thread(resolve_section, config.reward, "reward", config.names)
            async with serve(settings, endpoint_towards(redis), run) as addresses:
                await stay(addresses.grpc, addresses.url)
        elif run_id is not None:
            raise ConfigError(
                f"a section `reward` in run {run.run_id}",
                "none: it has an environment, or only distils a teacher",
                "Start no reward service for it.",
            )
        else:
            # A container starts before it knows the run, and would be restarted for ever.
            logger.info("run %s has no rewards; waiting for its end", run.run_id)
            await stop.wait()
