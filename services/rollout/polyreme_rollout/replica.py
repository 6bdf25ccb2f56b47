"""A vLLM replica's life: what it must know from Redis, the model's files, the engine, its service; and the same backwards.

Kept here: the engine is started before any thread or event loop, since it forks, so what needs those is imported after it. However
the process ends, its engine's processes and files end with it.
"""

import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.config.run import RunConfig
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net.endpoint import Place
from polyreme.process import logging_setup
from polyreme_rollout.temp_dir import scratch_directory

FIND_RUN_SECONDS = 60.0


@dataclass(frozen=True)
class Orders:
    """What the run record says to a replica."""

    run_id: str
    config: RunConfig
    model_files: dict[str, bytes]
    model_fingerprint: str
    newest: bool = False
    """Whether it serves whichever run is the newest, and ends when this one no longer is: its owner starts it anew."""


def serve_replica(redis_url: str, run_id: str | None, place: Place, wait: float = FIND_RUN_SECONDS) -> None:
    """Runs a replica until SIGTERM or SIGINT.

    Raises:
        StoreError, UnavailableError, ConfigError: see their messages.
    """
    logging_setup.setup("rollout")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the loop has its own: leave files tidy
    _check_ports(place)
    orders = asyncio.run(fetch_orders(redis_url, run_id, wait))
    with scratch_directory() as directory:
        # vLLM leaves its sockets and rendezvous files behind: they go with ours.
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        (model_dir := directory / "model").mkdir()
        for name, data in orders.model_files.items():
            (model_dir / Path(name).name).write_bytes(data)
        from polyreme_rollout.engine.vllm import start

        engine = start(orders.config, model_dir)
        try:
            asyncio.run(_serve(engine, orders, redis_url, place))
        finally:
            engine.close()


async def fetch_orders(redis_url: str, run_id: str | None, wait: float = FIND_RUN_SECONDS) -> Orders:
    """Waits `wait` seconds for the run (None: the newest that goes on). Raises StoreError, UnavailableError, ConfigError."""
    redis = await connect(redis_url)
    try:
        run = await Run.attach(redis, run_id, wait, ended=False)
        fingerprint = await run.model_fingerprint()
        return Orders(run.run_id, await run.config(), await run.model_files(), fingerprint, newest=run_id is None)
    finally:
        await redis.aclose()


async def _serve(engine: Any, orders: Orders, redis_url: str, place: Place) -> None:
    from polyreme.process import lifecycle
    from polyreme_rollout.serving import serve

    stop = lifecycle.stop_event()
    await engine.open()
    lifecycle.settle()
    await serve(engine, orders, redis_url, place, stop)


def _check_ports(place: Place) -> None:
    """A taken port is found before the engine's start, not after. Raises ConfigError."""
    from polyreme_rollout import http

    for port in (place.port, place.http_port):
        if port:
            http.bind(place.host, port).close()
