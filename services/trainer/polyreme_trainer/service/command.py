"""`polyreme serve`: a training service on this machine, in the foreground, or one of its processes alone.

Invariant: each of its processes ends with it, and a dead one is restarted. Nothing promised to a client is lost: the same command
in the same directory continues every model. A process alone is restarted by what started it, like a container's restart policy.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import httpx
import typer
import yaml
from rich.console import Console

from polyreme.config.named_input import MODEL
from polyreme.config.serve import ServeConfig, ServeLearner, read_serve
from polyreme.errors import ConfigError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.hub.resolve import resolve_path
from polyreme.hub.tiny_model import write_tiny_model
from polyreme.net import tls
from polyreme.net.endpoint import is_loopback
from polyreme.net.ports import free_port, join, loopback
from polyreme.net.redis_url import redis_option, without_password
from polyreme.page import PATH
from polyreme.process.lifecycle import OWNER_DIED, stop_event
from polyreme.process.machine import core_limit
from polyreme.process.supervisor import ProcessSet, ProcessSpec, Supervisor
from polyreme.process.tasks import running
from polyreme.rundir.run_directory import next_attempt, owned
from polyreme.rundir.run_records import write_atomically
from polyreme.terminal.terminal import TerminalConsole
from polyreme_trainer.launch.ranks import compute_environment, rank_programs
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.agents.run import agents_run_id, session_secrets

_GRACE_SECONDS = 15.0
_START_SECONDS = 300.0
DEMO = Path("polyreme-serve-demo")
_DEMO_LINES = """\
import tinker
model = tinker.ServiceClient(base_url="{url}", api_key="tml-any").create_lora_training_client(base_model="tiny", rank=8)
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([36, 37, 38]), loss_fn_inputs={{"target_tokens": [37, 38, 39]}})
for step in range(20): print(model.forward_backward([datum], "cross_entropy").result().metrics, \
model.optim_step(tinker.AdamParams(learning_rate=0.01)).result())
"""


class ServicePart(StrEnum):
    """A process of the service. The fourth one, the sampler, is `polyreme sampler`."""

    API = "api"
    LEARNER = "learner"
    OBSERVER = "observer"
    TURNS = "turns"


def serve(
    config: Annotated[Path | None, typer.Argument(help="The service's YAML file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the file with other values: port=8451.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help=f"Make a tiny model in ./{DEMO} and serve it.")] = False,
    part: Annotated[
        ServicePart | None,
        typer.Option(help="Run this process alone. Needs --redis, and an output_dir that it shares with the others."),
    ] = None,
    redis: Annotated[str | None, redis_option("With --part: the Redis in which the processes meet.")] = None,
) -> None:
    """Serve training: the Tinker API for programs that bring their own loop."""
    if demo == (config is not None):
        raise ConfigError("a YAML file or --demo", "both" if demo else "neither", "Write: polyreme serve FILE, or --demo.")
    console = TerminalConsole(sys.stdout)
    resolved = _resolved(read_serve(_write_demo() if config is None else config, overrides or ()))
    _check_access(resolved)
    if part is not None:
        _run_alone(part, resolved, redis)
        return
    with owned(resolved.run_dir):
        asyncio.run(_serve(resolved, console, demo))


def _check_access(config: ServeConfig) -> None:
    """Raises ConfigError when the API cannot have its accounts or its `security`, or would be open beyond loopback."""
    Accounts.read(config)
    security = config.security
    has_token = security is not None and security.token_env is not None
    if security is not None:
        tls.check_files(security)
    if has_token and config.tenants:
        raise ConfigError(
            "tenants, or security.token_env", "both", "Remove security.token_env: each tenant has a key of its own."
        )
    if config.host and not is_loopback(config.host) and not has_token and not config.tenants:
        raise ConfigError(
            f"tenants or security.token_env with host={config.host}",
            "none",
            "Name environment variables with keys: otherwise everyone who reaches the port can train, read and delete.",
        )


def _run_alone(part: ServicePart, config: ServeConfig, redis: str | None) -> None:
    """Runs a part in this process, or the learner's ranks below it, until a signal. Two of the same would both execute what is
    logged, so the second one is refused."""
    if redis is None:
        raise ConfigError("--redis URL with --part", "none", "Pass the Redis in which the processes meet.")
    with owned(config.run_dir / part):
        _write_config(config)
        if part == ServicePart.LEARNER and config.learner.parallel.world_size > 1:
            asyncio.run(_run_ranks(config, redis))
            return
        os.environ.update(_environment(part, config, redis))
        from polyreme_trainer.service.__main__ import main  # reads the environment

        sys.argv = ["polyreme", part]
        main()


async def _run_ranks(config: ServeConfig, redis: str) -> None:
    """Keeps the learner's ranks running until a signal. Raises ChildFailedError."""
    ranks = _learner(config, redis, next_attempt(config.run_dir))
    await _keep(Supervisor([ranks], config.max_restarts, first_backoff=0.2), stop_event())


async def _keep(supervisor: Supervisor, stop: asyncio.Event, *others: Coroutine[object, object, None]) -> None:
    """Keeps processes running until `stop`, then ends them. Raises ChildFailedError, or what one of `others` raises."""
    async with running(stop.wait()) as ending, running(supervisor.run(), *others) as working:
        await asyncio.wait({*ending, *working}, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done() and not stop.is_set():
                task.result()  # raises
        await supervisor.stop(_GRACE_SECONDS)


def _write_demo() -> Path:
    """Writes the demo's model and configuration, unless they are there."""
    DEMO.mkdir(exist_ok=True)
    if not (DEMO / "model").exists():
        write_tiny_model(DEMO / "model")
    sampler = {"engine": "transformers", "max_model_len": 256}
    tree = {"output_dir": "runs", "base_model": "tiny", "model": {"path": "model"}, "sampler": sampler}
    path = DEMO / "serve.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _resolved(config: ServeConfig) -> ServeConfig:
    """The configuration with a directory in place of a model's name, the base model's name, and the port."""
    path = resolve_path(config.model.path, MODEL, "model.path")
    name = config.base_model or (str(config.model.path) if path != config.model.path else path.name)
    model = config.model.model_copy(update={"path": path})
    learner = _with_all_cores(config) if config.device == "cpu" else config.learner
    ports: dict[str, object] = {"port": config.port or free_port(), "page_port": config.page_port or free_port()}
    if config.agents is not None:
        ports["agents"] = config.agents.model_copy(update={"port": config.agents.port or free_port()})
    return config.model_copy(update={"model": model, "base_model": name, "learner": learner, **ports})


def _with_all_cores(config: ServeConfig) -> ServeLearner:
    """The learner with as many threads as this machine has cores for each rank, unless configured. (Its clients wait for it.)"""
    parallel = config.learner.parallel
    if "threads" in parallel.model_fields_set:
        return config.learner
    threads = max(1, core_limit() // parallel.world_size)
    return config.learner.model_copy(update={"parallel": parallel.model_copy(update={"threads": threads})})


def _write_config(config: ServeConfig) -> None:
    """Writes what the processes read."""
    write_atomically(config.run_dir / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


async def _serve(config: ServeConfig, console: Console, demo: bool) -> None:
    stop = stop_event()
    log_dir = next_attempt(config.run_dir)
    _write_config(config)
    async with _redis(config.redis_dir) as server:
        url = str(without_password(server.url))  # the processes find its password in their environment
        kept = server.keep(config.max_restarts, console.print, "start the service again")
        supervisor = Supervisor(_processes(config, url, log_dir), config.max_restarts, first_backoff=0.2)
        async with running(_announce(config, console, log_dir, demo), _say_stop(stop, console)):
            await _keep(supervisor, stop, kept)


async def _say_stop(stop: asyncio.Event, console: Console) -> None:
    await stop.wait()
    console.print("stopping; the same command continues every model")


@asynccontextmanager
async def _redis(folder: Path) -> AsyncIterator[EmbeddedServer]:
    """Yields the service's own Redis, which ends with the block."""
    server = await EmbeddedServer.open(folder)
    try:
        yield server
    finally:
        server.stop()


def _environment(part: str, config: ServeConfig, redis: str) -> dict[str, str]:
    """The variables of a process of the service."""
    shared = {"POLYREME_REDIS": redis, "POLYREME_RUN_DIR": str(config.run_dir)}
    if part in ("turns", "agents"):
        return {**shared, **session_secrets(config)}
    return {**shared, **compute_environment(config.learner.parallel, config.device)} if part == ServicePart.LEARNER else shared


def _learner(config: ServeConfig, url: str, log_dir: Path) -> ProcessSet:
    """The learner's ranks, which restart together."""
    parallel, program = config.learner.parallel, ("-m", "polyreme_trainer.service", "learner")
    environment = _environment("learner", config, url)
    return ProcessSet("learner", lambda: rank_programs(parallel, program, environment), log_dir, serves=True)


def _processes(config: ServeConfig, url: str, log_dir: Path) -> list[ProcessSet]:
    """The API, the learner, the sampler, the observer, and what session addresses need, each of which restarts alone."""
    programs: dict[str, tuple[str, ...]] = {
        "api": ("-m", "polyreme_trainer.service", "api"),
        "sampler": ("-m", "polyreme_rollout.local"),
        "observer": ("-m", "polyreme_trainer.service", "observer"),
    }
    if config.agents is not None:
        run = ("--redis", url, "--run", agents_run_id(config), "--wait", str(_START_SECONDS))
        address = ("--host", config.host or loopback(), "--http-port", str(config.agents.port))
        programs["turns"] = ("-m", "polyreme_trainer.service", "turns")
        programs["agents"] = ("-m", "polyreme", "environment", *run, *address)

    def program(name: str) -> ProcessSet:
        environment = _environment(name, config, url)
        spec = ProcessSpec(name, (sys.executable, *programs[name]), environment, death_signal=OWNER_DIED)
        return ProcessSet(name, lambda: [spec], log_dir, serves=True)

    return [_learner(config, url, log_dir), *map(program, programs)]


async def _announce(config: ServeConfig, console: Console, log_dir: Path, demo: bool) -> None:
    """Prints the address once the API answers."""
    context = tls.peer_context(config.security) if config.security else None
    host = loopback() if config.host in (None, "0.0.0.0", "::") else config.host
    url = f"{'https' if context else 'http'}://{join(str(host), config.port)}"
    named = {"sni_hostname": config.security.server_name} if config.security and config.security.server_name else {}
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    async with httpx.AsyncClient(verify=context or False, trust_env=False) as client:
        while asyncio.get_running_loop().time() < deadline:
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}/api/v1/healthz", extensions=named)).status_code == 200:
                    page = f"http://{join(loopback(), config.page_port)}{PATH}/"
                    agents = "" if config.agents is None else f"session addresses at port {config.agents.port}, "
                    console.print(
                        f"serving {config.served_name} at {url}, {agents}page at {page}, logs in {log_dir}", soft_wrap=True
                    )
                    if demo:
                        console.print("\n" + _DEMO_LINES.format(url=url), soft_wrap=True)
                    return
            await asyncio.sleep(0.2)
    console.print(f"the API does not answer; see {log_dir / 'api.log'}", soft_wrap=True)
