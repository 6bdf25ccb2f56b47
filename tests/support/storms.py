"""Runs for storms of faults."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net.ports import free_port
from polyreme.rundir.input_files import read_model_files
from support.driver import Storm
from support.nursery import Nursery
from support.simulated import ROWS, config_tree
from support.tiny_tokenizer import model_files
from support.whole_run import make_game, make_task

MODULES = (
    "polyreme.cli.main",
    "polyreme_environment.command",
    "polyreme_environment.server",
    "polyreme_reward.command",
    "polyreme_reward.server",
    "polyreme_rollout.testing.simulated_replicas",
    "polyreme_trainer.testing.simulated_learner",
    "polyreme_trainer.orchestrator.main",
    "polyreme_trainer.testing.simulation",
)

REAL_REPLICAS = 2
REAL_PATIENCE = 60.0  # vLLM or megatron-core may have to restart first

REWARD = '''
import os, socket, time, zlib

def reward(response, label):
    """1 for the right answer. It notifies the driver of each call. A rare answer takes long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
        try:
            wire.sendto(b"score", {path!r})
        except OSError:
            pass  # the driver has ended
    time.sleep(2.0 if {rare} and zlib.crc32(response.encode()) % {rare} == 0 else 0.005)
    return float(label in response)
'''

ENVIRONMENT = '''
import http.client, json, re, socket, time, urllib.error, urllib.request, zlib

def told():
    """Notifies the driver of a turn."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
        try:
            wire.sendto(b"turn", {path!r})
        except OSError:
            pass  # the driver has ended

class Play:
    """Three turns; what it says depends on all that came before."""
    def reset(self, row, seed):
        self.state, self.said = seed % 7, 0
    def step(self, message):
        told()
        self.said += 1
        self.state = zlib.crc32(f"{{self.state}} {{message}}".encode())
        return f"turn {{self.state % 10}}", (self.state % 3) / 2, self.said == 3

def chat(request):
    """Asks again while the address cannot be reached, as public clients do."""
    for _ in range(100):
        try:
            return json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    raise TimeoutError("the session address cannot be reached")

def run(task, base_url, api_key):
    """The same as an agent, which rewrites its history once. It asks through a link that can be cut."""
    url = re.sub(":[0-9]+/", ":{address}/", base_url) + "/chat/completions"
    headers, messages = {{"authorization": f"Bearer {{api_key}}", "content-type": "application/json"}}, []
    for turn, word in enumerate({words!r}):
        messages = [*messages[2 * (turn == 2):], {{"role": "user", "content": word}}]
        messages.append(chat(urllib.request.Request(url, json.dumps({{"model": "m", "messages": messages}}).encode(), headers)))
        told()
    return (zlib.crc32(messages[-1]["content"].encode()) % 3) / 2
'''


@asynccontextmanager
async def _ground(
    nursery: Nursery, folder: Path, seed: int, config: RunConfig, files: dict[str, bytes], patience: float
) -> AsyncIterator[Storm]:
    """Creates a run with its own Redis and without processes. Rewards notify the driver of their calls through FOLDER/wire."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(folder / "redis"))
        redis = await connect(server.url)
        stack.push_async_callback(redis.aclose)
        run = await Run.create(redis, f"storm-{seed}-{os.urandom(3).hex()}", config, files)
        storm = Storm(run, folder, nursery, server, random.Random(seed), stack, patience)
        wire = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        wire.bind(str(folder / "wire"))
        wire.setblocking(False)
        loop = asyncio.get_running_loop()

        def scored() -> None:
            with suppress(BlockingIOError):
                while wire.recv(16):
                    storm.scored()

        loop.add_reader(wire, scored)
        stack.callback(loop.remove_reader, wire)
        try:
            yield storm
        finally:
            await storm.close()


def _telling_reward(folder: Path, rare: int = 0) -> dict[str, Any]:
    """Writes the reward into a new folder, and returns its configuration. One of `rare` answers takes two seconds; 0: none."""
    folder.mkdir(parents=True)
    (folder / "telling.py").write_text(REWARD.format(path=str(folder / "wire"), rare=rare))
    return {"rewards": [{"file": str(folder / "telling.py")}], "start_timeout": 600.0}


def _telling_environment(folder: Path, **section: Any) -> dict[str, Any]:
    """Makes a new folder for the environment, which `_start_environment` writes, and returns the configuration's sections."""
    folder.mkdir(parents=True)
    played = {"file": str(folder / "played.py"), "start_timeout": 600.0, "step_timeout": 5.0, "tries": 20, "workers": 2}
    return {"reward": None, "environment": {**played, **section}}


async def _start_environment(storm: Storm, words: Sequence[str] = ("turn 0", "turn 1", "turn 2")) -> None:
    """Starts the environment server. Its agents, which say these words, also reach it through a link that can be cut."""
    port = free_port()
    address = await storm.link("address", port)
    code = ENVIRONMENT.format(path=str(storm.folder / "wire"), address=address, words=words)
    (storm.folder / "played.py").write_text(code)
    reached = await _linked(storm, "environment")
    await storm.start("environment", "polyreme", "environment", "--http-port", str(port), *reached)


async def _linked(storm: Storm, name: str) -> tuple[str, ...]:
    """Options of a server whose clients reach it through a link that can be cut."""
    port = free_port()
    return ("--port", str(port), "--advertise", f"127.0.0.1:{await storm.link(name, port)}")


@asynccontextmanager
async def simulated_storm(
    nursery: Nursery,
    folder: Path,
    seed: int,
    *,
    iterations: int,
    supervised: bool,
    step_seconds: float = 0.003,
    train_seconds: float = 0.03,
    rare: int = 200,
    replica: tuple[str, ...] = (),
    environment: dict[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Storm]:
    """Starts a run with three simulated replicas.

    Args:
        environment: keys of the section `environment`, whose episodes are played in place of rewards.
        replica: further options of each replica. They may contain "{name}".
        supervised: whether a supervisor restarts orchestrator and learner, instead of the driver.
        rare: one of this number of answers takes the reward two seconds.
        sections: sections of the configuration: see `config_tree`.
    """
    sections = {
        "iterations": iterations,
        "rollout": {"start_timeout": 600.0, "chunk_timeout": 5.0, "max_new_tokens": 64},
        **({"reward": _telling_reward(folder, rare)} if environment is None else _telling_environment(folder, **environment)),
        "trainer": {"save_interval": 3, "max_restarts": 1000},
        **sections,
    }
    async with _ground(nursery, folder, seed, config_tree(folder, ROWS, **sections), model_files(), 3.0) as storm:
        for place in range(3):
            name = f"rollout-{place}"
            reached = await _linked(storm, name)
            options = ("--step-seconds", str(step_seconds), *(word.format(name=name) for word in replica))
            await storm.start(name, "polyreme_rollout.testing.simulated_replicas", *options, *reached)
        if environment is None:
            await storm.start("reward", "polyreme", "reward", *await _linked(storm, "reward"))
        else:
            await _start_environment(storm)
        if supervised:
            await start_supervisor(storm, train_seconds)
        else:
            await storm.start("learner", "polyreme_trainer.testing.simulated_learner", "--train-seconds", str(train_seconds))
            await storm.start("orchestrator", "polyreme_trainer.orchestrator")
        yield storm


async def start_supervisor(storm: Storm, train_seconds: float) -> None:
    """Starts a supervisor, which runs orchestrator and simulated learner."""
    options = ("--log-dir", str(storm.folder), "--train-seconds", str(train_seconds))
    await storm.start("supervisor", "polyreme_trainer.testing.simulation", *options)


def _real_task(folder: Path, iterations: int, *, agents: bool) -> Path:
    """Makes the run's folders and files: a task with a reward, or agents whose policy guesses numbers. Returns its configuration's path."""
    if agents:
        scores = _telling_environment(folder, function="run", step_timeout=60.0, max_turns=4)
    else:
        scores = {"reward": _telling_reward(folder)}
    path = make_game(folder) if agents else make_task(folder)
    tree = yaml.safe_load(path.read_text()) | scores
    tree |= {
        "name": "storm",
        "iterations": iterations,
        "groups_per_iteration": 4,
        "max_staleness": 1,
        "output_dir": str(folder / "runs"),
    }
    tree["data"].pop("eval", None)
    tree["rollout"] |= {"replicas": REAL_REPLICAS, "start_timeout": 600.0, "chunk_timeout": 10.0, "vllm": {"kv_cache_mib": 32}}
    tree["trainer"] |= {"save_interval": 2, "max_restarts": 1000}
    tree["trainer"]["sft"][0]["steps"] = 20
    path.write_text(yaml.safe_dump(tree))
    load_config(path).run_dir.mkdir(parents=True)
    return path


@asynccontextmanager
async def real_storm(nursery: Nursery, folder: Path, seed: int, iterations: int, *, agents: bool = False) -> AsyncIterator[Storm]:
    """Starts an asynchronous run of `polyreme train` with two vLLM replicas and megatron-core (tensor parallel 2)."""
    path = _real_task(folder, iterations, agents=agents)
    config = load_config(path)
    async with _ground(nursery, folder, seed, config, read_model_files(config.model.path), REAL_PATIENCE) as storm:
        run = ("--run", storm.run.run_id, "--log-dir", str(folder))
        for place in range(REAL_REPLICAS):
            name = f"rollout-{place}"
            await storm.start(name, "polyreme", "rollout", *await _linked(storm, name), forked=False)
        if agents:
            await _start_environment(storm, ("guess", "higher", "lower"))
        else:
            await storm.start("reward", "polyreme", "reward", *await _linked(storm, "reward"))
        await storm.start("supervisor", "polyreme", "train", str(path), *run, forked=False)
        yield storm
