"""`polyreme serve`: a training service on this machine, in the foreground.

Invariant: every process that it starts ends with it, and one that dies is started again. Nothing that a client was promised is lost: the same
command in the same directory continues every model.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import httpx
import typer
import yaml
from rich.console import Console

from polyreme.config.named_input import MODEL
from polyreme.config.serve import ServeConfig, read_serve
from polyreme.errors import ConfigError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.hub.resolve import resolve_path
from polyreme.hub.tiny_model import write_tiny_model
from polyreme.net.ports import free_port, join, loopback
from polyreme.net.redis_url import without_password
from polyreme.page import PATH
from polyreme.process.lifecycle import OWNER_DIED, stop_event
from polyreme.process.supervisor import ProcessSet, ProcessSpec, Supervisor
from polyreme.rundir.run_directory import next_attempt, owned
from polyreme.terminal.terminal import TerminalConsole
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.folders import REDIS

_GRACE_SECONDS = 15.0
_START_SECONDS = 300.0
DEMO = Path("polyreme-serve-demo")
_DEMO_LINES = """\
import tinker
model = tinker.ServiceClient(base_url="{url}", api_key="tml-any").create_lora_training_client(base_model="tiny", rank=8)
datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([36, 37, 38]), loss_fn_inputs={{"target_tokens": [37, 38, 39]}})
for step in range(20): print(model.forward_backward([datum], "cross_entropy").result().metrics, model.optim_step(tinker.AdamParams(learning_rate=0.01)).result())
"""


def serve(
    config: Annotated[Path | None, typer.Argument(help="The service's YAML file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the file with other values: port=8451.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help=f"Make a tiny model in ./{DEMO} and serve it.")] = False,
) -> None:
    """Serve training: the Tinker API for programs that bring their own loop."""
    if demo == (config is not None):
        raise ConfigError("a YAML file or --demo", "both" if demo else "neither", "Write: polyreme serve FILE, or --demo.")
    console = TerminalConsole(sys.stdout)
    resolved = _resolved(read_serve(_write_demo() if config is None else config, overrides or ()))
    Accounts.read(resolved)
    with owned(resolved.run_dir):
        asyncio.run(_serve(resolved, console, demo))


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
    ports = {"port": config.port or free_port(), "page_port": config.page_port or free_port()}
    return config.model_copy(update={"model": model, "base_model": name, **ports})


async def _serve(config: ServeConfig, console: Console, demo: bool) -> None:
    stop = stop_event()
    log_dir = next_attempt(config.run_dir)
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    async with _redis(config.run_dir / REDIS) as server:
        url = str(without_password(server.url))  # the processes find its password in their environment
        supervisor = Supervisor(_processes(config, url, log_dir), config.max_restarts, first_backoff=0.2)
        running, ending = asyncio.create_task(supervisor.run()), asyncio.create_task(stop.wait())
        keeping = asyncio.create_task(server.keep(config.max_restarts, console.print, "start the service again"))
        starting = asyncio.create_task(_announce(config, console, log_dir, demo))
        try:
            await asyncio.wait({running, keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # raises
            if running.done():
                running.result()  # raises
            console.print("stopping; the same command continues every model")
            await supervisor.stop(_GRACE_SECONDS)
        finally:
            for task in (starting, ending, keeping, running):
                task.cancel()
            await asyncio.gather(starting, ending, keeping, running, return_exceptions=True)


@asynccontextmanager
async def _redis(folder: Path) -> AsyncIterator[EmbeddedServer]:
    """Yields the service's own Redis, which ends with the block."""
    server = await EmbeddedServer.open(folder)
    try:
        yield server
    finally:
        server.stop()


def _processes(config: ServeConfig, url: str, log_dir: Path) -> list[ProcessSet]:
    """The API, the learner, the sampler and the observer, each of which restarts alone."""
    shared = {"POLYREME_REDIS": url, "POLYREME_RUN_DIR": str(config.run_dir)}
    compute = {"OMP_NUM_THREADS": str(config.learner.threads), "OMP_WAIT_POLICY": "passive"}
    programs = {
        "api": (("-m", "polyreme_trainer.service", "api"), shared),
        "learner": (("-m", "polyreme_trainer.service", "learner"), {**shared, **compute}),
        "sampler": (("-m", "polyreme_rollout.local"), shared),
        "observer": (("-m", "polyreme_trainer.service", "observer"), shared),
    }

    def program(name: str) -> ProcessSet:
        arguments, environment = programs[name]
        spec = ProcessSpec(name, (sys.executable, *arguments), environment, death_signal=OWNER_DIED)
        return ProcessSet(name, lambda: [spec], log_dir, serves=True)

    return [program(name) for name in programs]


async def _announce(config: ServeConfig, console: Console, log_dir: Path, demo: bool) -> None:
    """Prints the address once the API answers."""
    url = f"http://{join(loopback(), config.port)}"
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    async with httpx.AsyncClient(trust_env=False) as client:
        while asyncio.get_running_loop().time() < deadline:
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}/api/v1/healthz")).status_code == 200:
                    page = f"http://{join(loopback(), config.page_port)}{PATH}/"
                    console.print(f"serving {config.served_name} at {url}, page at {page}, logs in {log_dir}", soft_wrap=True)
                    if demo:
                        console.print("\n" + _DEMO_LINES.format(url=url), soft_wrap=True)
                    return
            await asyncio.sleep(0.2)
    console.print(f"the API does not answer; see {log_dir / 'api.log'}", soft_wrap=True)
