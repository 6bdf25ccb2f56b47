"""A process of a training service: `python -m polyreme_trainer.service api`, `learner`, `observer` or `turns`.

POLYREME_REDIS names its Redis, POLYREME_RUN_DIR its directory with config.yaml.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from redis.asyncio import Redis

from polyreme.config.serve import ServeConfig, read_serve
from polyreme.errors import ConfigError
from polyreme.experience.embedded_redis import kept_secret
from polyreme.experience.requests import RequestLog
from polyreme.experience.store import RECONNECT_TIMEOUT, connected
from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import GRACE_SECONDS, exit_at_once_on_sigterm, exit_on_error, freeze_gc, stop_event, until_set
from polyreme.process.quick_imports import quick_imports
from polyreme_trainer.learner.leader import LeaderError
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.agents.run import KEY_ENV, find_run, open_run, session_secrets
from polyreme_trainer.service.agents.sessions import AgentSessions
from polyreme_trainer.service.api import ServiceApi
from polyreme_trainer.service.folders import MODELS, Folders
from polyreme_trainer.service.http_answers import error_body, is_open
from polyreme_trainer.service.observer.observer import Observer
from polyreme_trainer.service.observer.port import observer_port

logger = logging.getLogger("polyreme.service")
SIGNING_KEY = "signing-key"
"""The file of the key that signs addresses of files, where only the service's user can read it."""


async def with_log(config: ServeConfig, work: Callable[[RequestLog, Redis, asyncio.Event], Awaitable[None]]) -> None:
    """Runs `work` until a signal, with the request log and its Redis. Also ends while Redis does not answer: then what waits for
    it is cancelled after GRACE_SECONDS."""
    stop = stop_event()
    async with until_set(stop, GRACE_SECONDS), connected(os.environ["POLYREME_REDIS"], RECONNECT_TIMEOUT) as redis:
        await work(RequestLog(redis, config.name), redis, stop)


def run_api(config: ServeConfig) -> None:
    """Answers HTTP until a signal."""

    async def serve(log: RequestLog, redis: Redis, stop: asyncio.Event) -> None:
        architecture = json.loads((config.model.path / "config.json").read_text())["model_type"]
        folders, longest = Folders(config.run_dir / MODELS), config.sampler.max_model_len
        key, accounts = kept_secret(config.redis_dir, SIGNING_KEY), Accounts.read(config)
        about = config.served_name, str(config.model.path), architecture, longest
        host, https = config.host or loopback(), config.security is not None and config.security.certificate is not None
        async with log.following(), AsyncExitStack() as stack:
            agents = None
            if config.agents is not None:
                run = await open_run(redis, config, config.agents)
                agents = await AgentSessions.open(
                    log, run, config.agents, accounts, session_secrets(config)[KEY_ENV], https=https
                )
                await stack.enter_async_context(agents.sweeping())
            api = ServiceApi(log, folders, *about, key, accounts, ending=stop, agents=agents)
            port = await stack.enter_async_context(
                serve_http(host, config.port, api.app(), 1.0, config.security, is_open, error_body)
            )
            logger.info("ready: %s:%d", host, port)
            await stop.wait()

    run_service(with_log(config, serve))


def run_learner(config: ServeConfig) -> None:
    """Runs one rank of the learner until a signal: rank 0 executes requests for models, and the others make its engine calls."""
    with quick_imports():
        from polyreme_trainer.service.engine import ServiceEngine
        from polyreme_trainer.service.learner import ModelLearner
        from polyreme_trainer.service.ranks import LeadingEngine, follow
        from polyreme_trainer.service.snapshots import SnapshotProbe
        from polyreme_trainer.service.states import States

    with ServiceEngine.open(config.as_run(), config.learner.resident_models, config.learner.same_bits) as engine:
        freeze_gc()
        if not engine.ranks.leads:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 finishes what it executes, for which it needs this one
            try:
                follow(engine, engine.ranks)
            except LeaderError as error:
                logger.info("rank 0 ended: %s", error.found)
                sys.exit(error.exit_code)
            return
        states = States(config.run_dir / MODELS, int(config.learner.checkpoints_gib * 2**30))

        async def execute(log: RequestLog, redis: Redis, stop: asyncio.Event) -> None:
            logger.info("ready: %s", config.served_name)
            canary = SnapshotProbe.of(engine.vocabulary, min(config.sampler.max_model_len, engine.longest), engine.dtype)
            async with log.following(), LeadingEngine(engine, engine.ranks).telling() as told:
                await ModelLearner(log, told, states, config.served_name, config.learner.max_models, canary).run(stop)

        run_service(with_log(config, execute))


def run_observer(config: ServeConfig) -> None:
    """Writes the models' run directories, and serves the page and the metrics, until a signal."""

    async def observe(log: RequestLog, redis: Redis, stop: asyncio.Event) -> None:
        observer = Observer(log, config.run_dir, config.model.path, config.served_name, Accounts.read(config).names)
        async with observer_port(observer, config.run_dir, config.page_port) as port:
            logger.info("ready: http://%s:%d", loopback(), port)
            await observer.run(stop)

    run_service(with_log(config, observe))


def run_turns(config: ServeConfig) -> None:
    """Samples the turns of agents' sessions until a signal."""
    from polyreme_trainer.service.agents.turns import serve_turns

    async def turns(log: RequestLog, redis: Redis, stop: asyncio.Event) -> None:
        if config.agents is None:
            raise ConfigError("a section `agents`, for the part `turns`", "none", "Add it, or do not start this part.")
        run = await find_run(redis, config)
        logger.info("ready: the turns of %s", run.run_id)
        async with log.following():
            await serve_turns(log, run, config, config.agents, stop)

    run_service(with_log(config, turns))


def main() -> None:
    exit_at_once_on_sigterm()
    part = sys.argv[1]
    logging_setup.setup(f"{part}-{os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else part)
    with exit_on_error(part):
        config = read_serve(Path(os.environ["POLYREME_RUN_DIR"]) / "config.yaml")
        {"api": run_api, "learner": run_learner, "observer": run_observer, "turns": run_turns}[part](config)


if __name__ == "__main__":
    main()
