"""The life of a replica process: it reads the run record and model files, starts the engine and the servers, and stops them in
reverse order.

Invariant: the engine starts before any thread or event loop, since it may fork; modules that start threads are imported later.
However the process ends, its engine's processes and files end with it. A live replica, or a process it forked, holds its
temporary directory's lock. A directory without a lock is a killed replica's; this user's next replica on this host removes it.
"""

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.net.endpoint import Endpoint
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import exec_again, exit_on_signals
from polyreme.process.resource_metrics import private_bytes_of_children
from polyreme.process.temp_root import REPLICA_ROOM, temp_root
from polyreme_rollout.devices.device_start import StartupGrant, devices_while_starting, release
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import InferenceEngine
from polyreme_rollout.http.model_config import config_for_model
from polyreme_rollout.run_spec import FIND_RUN_TIMEOUT, RunSpec, fetch_run_spec, report_engine, report_engine_end


def serve_replica(redis_url: str, run_id: str | None, endpoint: Endpoint, find_timeout: float = FIND_RUN_TIMEOUT) -> None:
    """Runs a replica until SIGTERM or SIGINT.

    After the turn of an engine that ends while the learner trains, the same command replaces this process. It waits for the next
    turn before it imports an engine, so it needs little memory until then.

    Raises:
        StoreError, UnavailableError, ConfigError: see their messages.
    """
    environment = dict(os.environ)
    if _serves_one_turn(redis_url, run_id, endpoint, find_timeout):
        exec_again(environment)


def _serves_one_turn(redis_url: str, run_id: str | None, endpoint: Endpoint, find_timeout: float) -> bool:
    """Returns whether the replica has left the devices to the learner."""
    logging_setup.setup("rollout")
    exit_on_signals()  # the event loop replaces it
    _check_ports(endpoint)
    spec = asyncio.run(fetch_run_spec(redis_url, run_id, find_timeout))
    start_engine = load_engine(spec.config.rollout.engine)
    with replica_temp_dir() as directory:
        # vLLM leaves sockets and rendezvous files in the temporary directory.
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        (model_dir := directory / "model").mkdir()
        for name, data in spec.model_files.items():
            (model_dir / Path(name).name).write_bytes(data)
        with devices_while_starting(spec, redis_url) as held:
            asyncio.run(report_engine(redis_url, spec.run_id, spec.config.rollout.engine))
            began = time.monotonic()
            engine = start_engine(spec.config, model_dir)
            try:
                check_routes(engine, spec.config)
                is_wanted = run_service(_serve(engine, spec, redis_url, endpoint, held, began))
                exit_on_signals()
                engine_bytes = private_bytes_of_children() if is_wanted else 0
            finally:
                engine.close()
            if is_wanted and held is not None:
                asyncio.run(release(redis_url, spec.run_id, held))
                asyncio.run(report_engine_end(redis_url, spec.run_id, engine_bytes))
            return is_wanted


def serve_model(model_dir: Path, endpoint: Endpoint) -> None:
    """Serves /v1 from the weights in a directory, without a run, until SIGTERM or SIGINT.

    Raises:
        ConfigError: it is not a model directory, or the port is in use.
    """
    logging_setup.setup("rollout")
    exit_on_signals()
    _check_ports(endpoint)
    config = config_for_model(model_dir)
    start_engine = load_engine(config.rollout.engine)
    with replica_temp_dir() as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        engine = start_engine(config, model_dir.resolve(), random_weights=False)
        try:
            run_service(_serve_model(engine, config, endpoint))
        finally:
            engine.close()


async def _serve_model(engine: InferenceEngine, config: RunConfig, endpoint: Endpoint) -> None:
    from polyreme.process import lifecycle
    from polyreme_rollout.serving import serve_v1

    stop = lifecycle.stop_event()
    await engine.open()
    lifecycle.freeze_gc()
    await serve_v1(engine, config, endpoint, stop)


async def _serve(
    engine: InferenceEngine, spec: RunSpec, redis_url: str, endpoint: Endpoint, held: StartupGrant | None, began: float
) -> bool:
    from polyreme.process import lifecycle
    from polyreme_rollout.serving import serve

    stop = lifecycle.stop_event()
    async with lifecycle.until_set(stop):
        await engine.open()
        lifecycle.freeze_gc()
        await report_engine(redis_url, spec.run_id, engine.name, time.monotonic() - began)
    return not stop.is_set() and await serve(engine, spec, redis_url, endpoint, stop, held)


def check_routes(engine: InferenceEngine, config: RunConfig) -> None:
    """Raises ConfigError when the run replays routes that the engine does not report."""
    if config.trainer.moe.replay_routes and not engine.reports_routes:
        raise ConfigError(
            "an engine that reports its chosen experts, for trainer.moe.replay_routes",
            f"{engine.name}, which does not",
            "Remove trainer.moe.replay_routes, or use an engine that reports its routes.",
        )


def _check_ports(endpoint: Endpoint) -> None:
    """Raises ConfigError for a port in use, before the engine starts."""
    from polyreme.net.http_server import bind

    for port in (endpoint.port, endpoint.http_port):
        if port:
            bind(endpoint.host, port).close()


_PREFIX = "polyreme-rollout-"


@contextmanager
def replica_temp_dir(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """A directory for the block, see `temp_root`. Removes the directories of killed replicas first."""
    root = temp_root(REPLICA_ROOM, environ)
    _remove_abandoned(root)
    hidden = Path(tempfile.mkdtemp(prefix="." + _PREFIX, dir=root))
    lock = _lock(hidden)
    directory = hidden.rename(hidden.with_name(hidden.name[1:]))  # locked before others can see its name
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for directory in root.glob(_PREFIX + "*"):
        with suppress(OSError):  # another user's, already removed, or in use
            lock = _lock(directory)
            if os.fstat(lock).st_uid == os.getuid():  # others may put any name into a shared directory
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
