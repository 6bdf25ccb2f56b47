"""A training service of its own processes, and programs of its tenants."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml

from polyreme.net.ports import free_port
from support.processes import command_line

TESTS = Path(__file__).resolve().parents[1]
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Parts:
    """The processes of a service, each on its own as in a container. What ends is started again by the test."""

    def __init__(self, commands: Mapping[str, Sequence[str]], folder: Path, environment: dict[str, str]) -> None:
        self._commands, self._folder, self.environment = commands, folder, {**os.environ, **QUIET, **environment}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, part: str) -> subprocess.Popen[bytes]:
        """Starts a part, also in place of one that has ended. Returns its process."""
        with open(self._folder / f"{part}.log", "ab") as log:
            self._running[part] = subprocess.Popen(
                self._commands[part], stdout=log, stderr=subprocess.STDOUT, env=self.environment
            )
        return self._running[part]

    def kill(self, part: str) -> None:
        self._running[part].kill()
        self._running[part].wait()

    def refusal(self, part: str) -> str:
        """What a further process of a part says, which is refused."""
        done = subprocess.run(
            self._commands[part], env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode != 0
        return done.stderr

    def end(self) -> dict[str, int]:
        """Ends all by SIGTERM. Returns their statuses."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        return {part: process.wait(120) for part, process in self._running.items()}


class Service:
    """A running `polyreme serve`."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, folder: Path) -> None:
        self._process, self.url, self.folder = process, url, folder

    def kill(self, part: str, rank: int = 0) -> None:
        """Kills a rank of the learner, the API, the sampler or Redis, unless it is just being started again."""
        words = {"sampler": "polyreme_rollout.local", "redis": "redis-server|valkey-server|_binary"}.get(part, f"^{part}$")
        for child in psutil.Process(self._process.pid).children():
            with suppress(psutil.NoSuchProcess):
                here = part != "learner" or child.environ().get("RANK") == str(rank)
                if here and any(re.search(words, word) for word in command_line(child)):
                    child.kill()

    def saved(self, path: str) -> Path:
        """The directory of a tinker:// path."""
        return self.folder / "models" / path.removeprefix("tinker://")


@contextmanager
def service(
    folder: Path,
    model: Path,
    name: str,
    length: int,
    engine: str = "transformers",
    vllm: Mapping[str, object] | None = None,
    parallel: Mapping[str, int] | None = None,
    agents: bool = False,
) -> Iterator[Service]:
    """Serves a model until the block ends.

    Args:
        name: the base model's name for clients.
        length: of prompt and answer.
        vllm: the section sampler.vllm.
        parallel: the layout of the learner's ranks; None: one.
        agents: whether it has session addresses.
    """
    url, file = f"http://127.0.0.1:{(port := free_port())}", folder / "serve.yaml"
    sampler = {"engine": engine, "max_model_len": length, "vllm": dict(vllm or {})}
    learner = {"parallel": dict(parallel or {})}
    tree = {
        "base_model": name,
        "port": port,
        "model": {"path": str(model)},
        "sampler": sampler,
        "learner": learner,
        "agents": {"port": 0} if agents else None,
        "quota": {"models": 64},  # all tests of a module are one tenant
        "output_dir": "out",
    }
    file.write_text(yaml.safe_dump(tree))
    with open(folder / "serve.log", "wb") as log:
        command = [sys.executable, "-m", "polyreme", "serve", str(file)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **QUIET})
    try:
        yield Service(process, url, folder / "out" / "serve")
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(120)
    assert status == 0, (folder / "serve.log").read_text()


class Program:
    """A tenant's program that runs."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], file: Path) -> None:
        self._file = file
        with open(file, "wb") as log:
            environment = {**os.environ, **QUIET, **environment}
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    async def wait_for(self, line: str) -> None:
        """Waits until the program has written a line that begins so."""
        async with asyncio.timeout(600):
            while not any(each.startswith(line) for each in self._file.read_text().splitlines()):
                assert self._process.poll() is None, self._file.read_text()
                await asyncio.sleep(0.05)

    def result(self, within: float = 900.0) -> Any:
        """The JSON of its last line, once it has ended well."""
        try:
            assert self._process.wait(within) == 0, self._file.read_text()
        finally:
            self._process.kill()
        return json.loads(self._file.read_text().splitlines()[-1])

    def ended(self, within: float = 900.0) -> str:
        """Its output, once it has ended well."""
        began = time.monotonic()
        assert self._process.wait(within) == 0, (time.monotonic() - began, self._file.read_text()[-5000:])
        return self._file.read_text()


def tenant(running: Service, case: str, folder: Path) -> Program:
    """Starts a case of `tinker_client`."""
    return client(running.url, "tml-any", case, folder)


def client(url: str, key: str, case: str, folder: Path) -> Program:
    """Starts a case of `tinker_client` at a URL, with an api key."""
    command = [sys.executable, "-W", "ignore", "-m", "support.tinker_client", url, case]
    return Program(command, folder, {"PYTHONPATH": str(TESTS), "TINKER_API_KEY": key}, folder / f"{case}.log")


def three_tenants(url: str, base: str, folder: Path, *ends: str) -> Program:
    """Starts `tinker_storm`."""
    command = [sys.executable, "-W", "ignore", "-m", "support.tinker_storm", url, base, *ends]
    return Program(command, folder, {"PYTHONPATH": str(TESTS)}, folder / "clients.log")
