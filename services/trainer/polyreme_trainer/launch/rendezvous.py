"""A launch: the leases of its machines, the files that they share, and the agent that each machine starts.

Invariant: a machine takes part in a launch only if it sees the trainer's run directory and the same model files.
"""

import asyncio
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme.experience.leases import Lease, LeaseKeeper, Registry
from polyreme.experience.run import Run
from polyreme.process.lifecycle import Child
from polyreme.process.supervisor import FINAL_CODES
from polyreme.rundir.input_files import read_model_files
from polyreme_trainer.launch.trainer_process import rank_environment

AGENT = ("-m", "polyreme_trainer.launch.agent")
"""Python's arguments for a machine's agent. It takes: rendezvous, launch, node, nodes, ranks per node, and a rank's arguments."""


@dataclass(frozen=True)
class LaunchTimes:
    """Deadlines of a launch on several machines, in seconds.

    Attributes:
        notice: after so long a wait a notice names the missing machines.
        files: within which the other machines must see the trainer's file.
        back: a lease missing for longer is lost. It exceeds the renewal interval, since a lease can expire while Redis is paused.
        report: for the other machines to report the end of their ranks after this machine's ranks have ended, and vice versa.
    """

    notice: float = 2.0
    files: float = 10.0
    back: float = 6.0
    report: float = 5.0


TIMES = LaunchTimes()


class MachineError(PolyremeError):
    """Another machine's part of a launch has failed. `exit_code` is that of its ranks if a restart would fail in the same way."""

    def __init__(self, lease: Lease, found: str, do: str, status: int = 1) -> None:
        super().__init__(f"the learner's machine {lease.facts['node']} ({lease.address}) to keep running", found, do)
        self.exit_code = status if status in FINAL_CODES else 1


class Machines:
    """The leases of a run's learner machines by id, and the time for which each has been missing."""

    def __init__(self, run: Run, times: LaunchTimes = TIMES) -> None:
        self._run, self._registry, self._times = run, Registry(run), times
        self._missed: dict[str, float] = {}

    async def register(self, lease: Lease) -> LeaseKeeper:
        """Registers a machine, with the time of Redis as its fact `at`: the clocks of machines differ."""
        return await self._registry.register(replace(lease, facts={**lease.facts, "at": await self._registry.now()}))

    async def there(self) -> dict[str, Lease]:
        return {lease.id: lease for lease in await self._registry.leases("learner")}

    async def call(self) -> Lease | None:
        """The newest launch."""
        calls = [lease for lease in (await self.there()).values() if lease.facts["node"] == 0]
        return max(calls, key=lambda lease: lease.facts["at"], default=None)

    async def answers(self, launch: str) -> dict[int, Lease]:
        """The newest lease of each node that has answered the launch."""
        found = sorted((await self.there()).values(), key=lambda lease: lease.facts["at"])
        return {lease.facts["node"]: lease for lease in found if lease.facts.get("launch") == launch}

    def is_lost(self, lease: str, present: bool) -> bool:
        """Whether a lease was missing at every call for `LaunchTimes.back`. `present`: whether it exists now."""
        now = time.monotonic()
        if present:
            self._missed.pop(lease, None)
            return False
        return now - self._missed.setdefault(lease, now) > self._times.back


def check_launch(lease: Lease, call: Lease) -> None:
    """Raises MachineError when a machine's part of the launch has failed."""
    if lease.facts["launch"] == call.id and lease.facts["status"]:
        log = log_path_of(call, lease.facts["node"])
        raise MachineError(lease, lease.facts["why"], f"See {log}.", lease.facts["status"])


async def check_files(run: Run, config: RunConfig, launch: str, seconds: float) -> None:
    """Raises ConfigError unless the run directory and model are those of the trainer's machine. `seconds`: to see its file."""
    deadline, proof = time.monotonic() + seconds, proof_of(config, launch)
    while not proof.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the trainer's run directory at {config.run_dir} of {socket.gethostname()}",
                f"no {proof.name} in it",
                "Mount one file system for all machines of the learner, at the same path (output_dir).",
            )
        await asyncio.sleep(0.5)
    if await asyncio.to_thread(read_model_files, config.model.path) != await run.model_files():
        raise ConfigError(
            f"the run's model at model.path = {config.model.path} of {socket.gethostname()}",
            "a different one",
            "Mount the same directory on all machines of the learner, at the same path.",
        )


def proof_of(config: RunConfig, launch: str) -> Path:
    """The file that the trainer's machine creates for each launch. A machine that sees it shares the run directory. Each launch
    has a new name, so that no cache can contain it."""
    return config.run_dir / f".launch-{launch}"


def log_path_of(call: Lease, node: int) -> Path:
    return Path(call.facts["log_dir"]) / f"learner-node-{node}.log"


def start_agent(
    call: Lease,
    node: int,
    run: Run,
    config: RunConfig,
    redis_url: str,
    ranks: Sequence[str],
    agent: Sequence[str],
    log_path: Path | None,
) -> Child:
    """Starts a machine's agent, which starts the machine's ranks. Without `log_path` they write to this process's outputs."""
    parallel = config.trainer.parallel
    position = (call.address, call.id, str(node), str(parallel.nodes), str(parallel.ranks_per_node))
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = rank_environment(config, run.run_id, redis_url)
    return Child.spawn(f"learner's machine {node}", (sys.executable, *agent, *position, *ranks), environment, log_path)
