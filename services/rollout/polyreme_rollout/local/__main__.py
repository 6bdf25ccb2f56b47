"""The sampler process of a training service. POLYREME_REDIS and POLYREME_RUN_DIR name the service, as for its learner.

`polyreme sampler` runs it alone, in an image that has no learner.
"""

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.named_input import MODEL
from polyreme.config.serve import ServeConfig, read_serve
from polyreme.errors import ConfigError
from polyreme.experience.requests import RequestLog
from polyreme.experience.store import RECONNECT_TIMEOUT, connected
from polyreme.hub.resolve import resolve_path
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import GRACE_SECONDS, exit_at_once_on_sigterm, exit_on_error, freeze_gc, stop_event, until_set
from polyreme.rundir.run_directory import owned
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.plain_openai import TokenizerCodec
from polyreme_rollout.engine.protocol import InferenceEngine
from polyreme_rollout.engine.vllm_arguments import with_planned_loras
from polyreme_rollout.local.requests import ServedSampler
from polyreme_rollout.local.weights import SavedWeights


async def serve(config: ServeConfig, engine: InferenceEngine, url: str) -> None:
    """Answers requests until a signal. What it awaits GRACE_SECONDS later is cancelled: the next start answers its requests."""
    stop = stop_event()
    async with until_set(stop, GRACE_SECONDS):
        path = config.model.path
        codec = await asyncio.to_thread(TokenizerCodec.of, path)
        async with connected(url, RECONNECT_TIMEOUT) as redis:
            await engine.open()
            with closing(SavedWeights(path, engine.weight_names, config.model.dtype)) as weights:
                freeze_gc()
                log = RequestLog(redis, config.name)
                await ServedSampler(log, engine, weights, codec.stop_ids, codec.decode_whole).run(stop)


def run(config: ServeConfig, url: str) -> None:
    """Runs the sampler of a service until a signal. `url`: its Redis."""
    settings = with_planned_loras(config.as_run())
    with closing(load_engine(settings.rollout.engine)(settings, settings.model.path, random_weights=False)) as engine:
        run_service(serve(config, engine, url))


def sampler(
    config: Annotated[Path, typer.Argument(help="The service's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the file with other values, as for its other processes."),
    ] = None,
    redis: Annotated[str | None, redis_option("The Redis in which the service's processes meet.")] = None,
) -> None:
    """Sample for a training service whose other processes are `polyreme serve --part`."""
    logging_setup.setup("sampler")
    if redis is None:
        raise ConfigError("--redis URL", "none", "Pass the Redis in which the service's processes meet.")
    given = read_serve(config, overrides or ())
    path = resolve_path(given.model.path, MODEL, "model.path")
    resolved = given.model_copy(update={"model": given.model.model_copy(update={"path": path})})
    with owned(resolved.run_dir / "sampler"):
        run(resolved, redis)


def main() -> None:
    exit_at_once_on_sigterm()
    logging_setup.setup("sampler")
    with exit_on_error("sampler"):
        run(read_serve(Path(os.environ["POLYREME_RUN_DIR"]) / "config.yaml"), os.environ["POLYREME_REDIS"])


if __name__ == "__main__":
    main()
