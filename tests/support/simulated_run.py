"""A whole run as processes, without a model: real Redis, reward server, supervisor and orchestrator; simulated learner and replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect
from polyreme.process.lifecycle import Child
from support.commands import spawn
from support.simulated import ROWS, config_tree
from support.tiny_tokenizer import model_files


@dataclass
class SimulatedRun:
    """The run's processes by name. `start` starts one, also again after its end."""

    redis_url: str
    run: Run
    folder: Path
    commands: dict[str, tuple[str, ...]]
    executable: str | None = None
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str) -> None:
        environment = {"POLYREME_REDIS": self.redis_url, "POLYREME_RUN": self.run.run_id, "OMP_NUM_THREADS": "1"}
        module, *options = self.commands[name]
        self.children[name] = spawn(name, module, options, environment, self.folder / f"{name}.log", self.executable)

    async def ended(self, seconds: float) -> tuple[RunState, str]:
        """Waits for the trainer's end. Returns the run's last state and its reason. After the timeout it fails with the logs."""
        try:
            await asyncio.wait_for(self.children["train"].wait(), seconds)
        except TimeoutError:
            raise AssertionError(f"not done within {seconds} s\n{self.logs()}") from None
        return await self.run.state()

    def logs(self, lines: int = 25) -> str:
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) for log in sorted(self.folder.glob("*.log")))  # fmt: skip

    async def records(self, kind: str) -> list[dict[str, Any]]:
        found, last = [], "0"
        while batch := await self.run.records(last, 0):
            last = batch[-1][0]
            found += [record for _, record in batch if record["kind"] == kind]
        return found


@asynccontextmanager
async def simulated_run(
    redis_url: str,
    run_id: str,
    folder: Path,
    *,
    replica_processes: int = 1,
    replicas: tuple[str, ...] = ("--step-seconds", "0.002"),
    reward_command: tuple[str, ...] = ("polyreme", "reward"),
    train_seconds: float = 0.05,
    first_group: int = 0,
    http_port: int | None = None,
    executable: str | None = None,
    **sections: Any,
) -> AsyncIterator[SimulatedRun]:
    """Starts the run. Ends and removes everything at the end of the block.

    Args:
        replica_processes: each with `replicas` as its options.
        reward_command: module and options of the reward server.
        first_group: first group of a fork.
        http_port: port of the trainer's metrics and page.
        executable: the interpreter of the trainer's children, if stand-ins do not suffice: see `spawn`.
        sections: sections of the configuration: see `config_tree`.
    """
    redis = await connect(redis_url)
    config = config_tree(folder, ROWS, **sections)
    run = await Run.create(redis, run_id, config, model_files(), first_group)
    commands = {
        f"rollout-{place}": ("polyreme_rollout.testing.simulated_replicas", *replicas) for place in range(replica_processes)
    }
    if config.reward is not None:
        commands["reward"] = reward_command
    if config.environment is not None:
        commands["environment"] = ("polyreme", "environment")
    commands["train"] = (
        "polyreme_trainer.testing.simulation", "--log-dir", str(folder), "--train-seconds", str(train_seconds),
        *(() if http_port is None else ("--http-port", str(http_port))),
    )  # fmt: skip
    started = SimulatedRun(redis_url, run, folder, commands, executable)
    try:
        for name in commands:
            started.start(name)
        yield started
    finally:
        await asyncio.gather(*(child.stop(300) for child in started.children.values()))
        await redis.aclose()
