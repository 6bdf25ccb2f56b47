"""`python -m polyreme_rollout.testing.simulated_replicas`: simulated replicas of a run, several in one process, for tests and scale runs.

Kept here: only the engine is simulated. Service, swaps, leases and gRPC are those of `polyreme rollout`, and each replica has its own.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyreme.net.endpoint import Advertise, Place, Port, place_of
from polyreme.net.redis_url import redis_option
from polyreme.process import lifecycle, logging_setup
from polyreme_rollout.replica import Orders, fetch_orders
from polyreme_rollout.serving import serve
from polyreme_rollout.testing.simulated_engine import Lengths, SimulatedEngine

WEIGHT_NAMES = frozenset({"weight"})
"""What the simulated learner's versions are made of."""


def simulation(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="How many, each with a lease of its own.")] = 1,
    step_seconds: Annotated[float, typer.Option(min=0, help="Of one token of every request under way.")] = 0.0,
    mean_length: Annotated[float, typer.Option(min=1, help="Tokens up to the end token.")] = 32.0,
    length_spread: Annotated[float, typer.Option(min=0, help="Of the mean's logarithm over seeds; 1: a long tail.")] = 0.0,
    count: Annotated[Path | None, typer.Option(help="Gets a line with Unix time and tokens sampled so far, each second.")] = None,
    port: Port = 0,
    advertise: Advertise = None,
) -> None:
    """Serves a run with simulated engines; context, vocabulary and end token are the run's."""
    logging_setup.setup("rollout")
    with lifecycle.exit_on_error("rollout"):
        place = place_of(None, port, None, advertise, redis)
        asyncio.run(_simulate(redis, run, replicas, step_seconds, mean_length, length_spread, count, place))


async def _simulate(
    redis_url: str,
    run_id: str | None,
    replicas: int,
    step_seconds: float,
    mean_length: float,
    length_spread: float,
    count: Path | None,
    place: Place,
) -> None:
    stop = lifecycle.stop_event()
    orders = await fetch_orders(redis_url, run_id)
    lengths = Lengths(mean_length, length_spread, _end_id(orders))
    engines = [
        SimulatedEngine(
            WEIGHT_NAMES,
            orders.config.rollout.max_model_len,
            json.loads(orders.model_files["config.json"])["vocab_size"],
            step_seconds,
            orders.config.rollout.max_num_seqs,
            lengths,
        )
        for _ in range(replicas)
    ]
    lifecycle.settle()
    counting = asyncio.create_task(_count(engines, count)) if count else None
    try:
        await asyncio.gather(*(serve(engine, orders, redis_url, place, stop) for engine in engines))
    finally:
        if counting:
            counting.cancel()
        for engine in engines:
            engine.close()


async def _count(engines: Sequence[SimulatedEngine], path: Path) -> None:
    with path.open("a", buffering=1) as file:
        while True:
            file.write(f"{time.time():.3f} {sum(engine.tokens for engine in engines)}\n")
            await asyncio.sleep(1.0)


def _end_id(orders: Orders) -> int:
    """The token that ends answers: what the model's files say, else 1."""
    for name in ("generation_config.json", "config.json"):
        stop = json.loads(orders.model_files.get(name, b"{}")).get("eos_token_id")
        if stop is not None:
            return int(stop[0] if isinstance(stop, list) else stop)
    return Lengths.end_id


if __name__ == "__main__":
    typer.run(simulation)
