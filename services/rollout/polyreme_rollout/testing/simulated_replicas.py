"""`python -m polyreme_rollout.testing.simulated_replicas`: simulated replicas of a run, several in one process.

Invariant: only the engine is simulated. Each replica has its own service, weight swapper, lease, gRPC and HTTP server, as
in `polyreme rollout`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from polyreme.net.endpoint import Advertise, Endpoint, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import lifecycle, logging_setup
from polyreme_rollout.run_spec import fetch_run_spec
from polyreme_rollout.serving import serve
from polyreme_rollout.testing.simulated_engine import Lengths, SimulatedInferenceEngine, end_id, for_run

_START_INTERVAL = 0.02
"""Seconds between replicas' starts. A thousand at once take so much of each other's time that connections to Redis time out."""


def simulation(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; default: the newest run.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas, each with its own lease.")] = 1,
    step_seconds: Annotated[float, typer.Option(min=0, help="Duration of one token of every running request.")] = 0.0,
    mean_length: Annotated[float, typer.Option(min=1, help="Mean number of tokens up to the end token.")] = 32.0,
    length_spread: Annotated[
        float, typer.Option(min=0, help="Standard deviation over seeds of the mean's logarithm; 1: a long tail.")
    ] = 0.0,
    count: Annotated[
        Path | None, typer.Option(help="File that gets a line with Unix time and sampled tokens ten times a second.")
    ] = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    http: Annotated[bool, typer.Option(help="Whether each replica has an HTTP port.")] = True,
    advertise: Advertise = None,
) -> None:
    """Serves a run with simulated engines that have its context, vocabulary and end token."""
    logging_setup.setup("rollout")
    with lifecycle.exit_on_error("rollout"):
        endpoint = endpoint_of(None, port, http_port, advertise, redis)
        endpoint = endpoint if http else replace(endpoint, http_port=None)
        asyncio.run(_simulate(redis, run, replicas, step_seconds, mean_length, length_spread, count, endpoint))


async def _simulate(
    redis_url: str,
    run_id: str | None,
    replicas: int,
    step_seconds: float,
    mean_length: float,
    length_spread: float,
    count: Path | None,
    endpoint: Endpoint,
) -> None:
    stop = lifecycle.stop_event()
    spec = await fetch_run_spec(redis_url, run_id)
    lengths = Lengths(mean_length, length_spread, end_id(spec.model_files))
    engines = [for_run(spec.config, spec.model_files, lengths, step_seconds) for _ in range(replicas)]
    lifecycle.freeze_gc()
    counting = asyncio.create_task(_count(engines, count)) if count else None
    try:
        serving: list[asyncio.Task[bool]] = []
        for engine in engines:
            serving.append(asyncio.create_task(serve(engine, spec, redis_url, endpoint, stop)))
            await asyncio.sleep(_START_INTERVAL)
        await asyncio.gather(*serving)
    finally:
        if counting:
            counting.cancel()
        for engine in engines:
            engine.close()


async def _count(engines: Sequence[SimulatedInferenceEngine], path: Path) -> None:
    with path.open("a", buffering=1) as file:
        while True:
            file.write(f"{time.time():.3f} {sum(engine.tokens for engine in engines)}\n")
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    typer.run(simulation)
