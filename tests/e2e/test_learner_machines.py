"""A learner on two machines produces the same bits as on one machine, even when either machine's processes are killed or disconnected.

The ranks, torchrun's agents, leases, log and checkpoints are real. There are no replicas and no orchestrator: the test fills the log. One
test runs everything for real, with the commands of the guide.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from polyreme.config.model import ModelConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import ParallelConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect
from polyreme.process.lifecycle import Child
from polyreme.rundir.input_files import read_model_files
from support.configs import run_config
from support.differing_weights import compare
from support.filled_log import fill
from support.machines import Machine, Network, redis_on
from support.models import tiny_model
from support.processes import command_line
from support.ranks import run_ranks
from support.whole_run import make_task

pytestmark = [pytest.mark.slow, pytest.mark.real]

ITERATIONS, GROUPS, SAMPLES, SAVE_INTERVAL = 6, 4, 4, 2
TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Cluster:
    """A run whose learner is on the machines of a network. The first one is the trainer's."""

    run: Run
    config: RunConfig
    url: str
    folder: Path
    machines: list[Machine | None]
    children: dict[int, Child]
    groups: int = 0

    def start(self, node: int) -> None:
        environment = {"POLYREME_REDIS": self.url, "POLYREME_RUN": self.run.run_id, "PYTHONPATH": str(TESTS)}
        argv, machine = (sys.executable, "-m", "support.lone_machine", str(node), str(self.folder)), self.machines[node]
        command = argv if machine is None else machine.command(argv)
        log = self.folder / f"machine-{node}.log"
        self.children[node] = Child.spawn(f"machine-{node}", command, environment, log, signal.SIGTERM)

    def pids(self, **environment: str) -> list[int]:
        """The pids of this run's processes with these values in their environment."""
        wanted, found = {"POLYREME_RUN": self.run.run_id, **environment}, []
        for process in psutil.process_iter():
            try:
                if wanted.items() <= process.environ().items():
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def leaders(self) -> list[int]:
        return [pid for pid in self.pids() if "polyreme_trainer.launch" in command_line(psutil.Process(pid))]

    async def trained(self, iteration: int) -> None:
        """Allows groups up to an iteration and waits until it is trained."""
        self.groups = iteration * GROUPS
        async with asyncio.timeout(600):
            while not [r for _, r in await self.run.records("0", 0) if r["kind"] == "iteration" and r["iteration"] == iteration]:
                assert self.children[0].poll() is None, self.logs()
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.3)  # after its save, if it has one

    async def done(self) -> dict[str, Any]:
        """Lets the run finish with all its groups. Returns its results."""
        self.groups = ITERATIONS * GROUPS
        try:
            await asyncio.wait_for(self.children[0].wait(), 900)
        except TimeoutError:
            raise AssertionError(self.logs()) from None
        assert await self.run.state() == (RunState.DONE, ""), self.logs()
        assert (await ExperienceLog(self.run).audit()).clean
        for child in self.children.values():
            assert await child.gone(300) and child.poll() == 0, self.logs()
        assert not self.pids()
        path = self.config.run_dir / "checkpoints" / f"iteration-{ITERATIONS:06d}"
        return {
            "export": (self.config.run_dir / "hf" / path.name / "model.safetensors").read_bytes(),
            "state": torch.load(path / "state-0.pt", weights_only=True),
            "random": [(path / f"rng-{rank}.pt").read_bytes() for rank in range(2)],
        }

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)


@asynccontextmanager
async def cluster(url: str, run_id: str, folder: Path, model: Path, machines: list[Machine | None]) -> AsyncIterator[Cluster]:
    """Starts a run on these machines (None: on this host). Everything ends with the block."""
    os.mkdir(folder)
    parallel = ParallelConfig(data=2, nodes=len(machines))
    base = run_config(folder, iterations=ITERATIONS, groups_per_iteration=GROUPS, group_size=SAMPLES)
    trainer = base.trainer.model_copy(update={"save_interval": SAVE_INTERVAL, "parallel": parallel, "max_restarts": 5})
    config = base.model_copy(
        update={"model": ModelConfig(path=model), "trainer": trainer, "algorithm": AlgorithmConfig(minibatches=2)}
    )
    config.run_dir.mkdir(parents=True)
    redis = await connect(url)
    run = await Run.create(redis, run_id, config, read_model_files(model))
    made = Cluster(run, config, url, folder, machines, {})
    filling = asyncio.create_task(fill(run, GROUPS, SAMPLES, allowed=lambda: made.groups))
    try:
        for node in range(len(machines)):
            made.start(node)
        yield made
        assert not filling.done(), filling.exception()
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await asyncio.gather(*(child.stop(300) for child in made.children.values()))
        await redis.aclose()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["export"] == expected["export"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert found["random"] == expected["random"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tiny_model("tied", tmp_path / "model")
    (path / "tokenizer.json").write_text("[]")
    return path


async def test_two_machines_arrive_at_the_bits_of_one(net: Network, run_id: str, tmp_path: Path, model: Path) -> None:
    trainer, other = net.add(), net.add()
    async with redis_on(trainer, tmp_path) as url:
        async with cluster(url, f"{run_id}-one", tmp_path / "one", model, [None]) as one:
            expected = await one.done()
        async with cluster(url, f"{run_id}-two", tmp_path / "two", model, [trainer, other]) as two:
            await two.trained(3)
            for rank, machine in ((0, trainer), (1, other)):
                [pid] = two.pids(RANK=str(rank))
                assert os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{machine.name}").st_ino
            same(await two.done(), expected)

        async with cluster(url, f"{run_id}-killed", tmp_path / "killed", model, [trainer, other]) as killed:
            await killed.trained(3)
            killed.children[1].kill()  # the machine's process; its agent and its rank die with it
            await killed.children[1].reap()
            killed.start(1)
            await killed.trained(4)
            os.kill(*killed.pids(RANK="0"), signal.SIGKILL)
            await killed.trained(5)
            os.kill(*killed.leaders(), signal.SIGKILL)
            same(await killed.done(), expected)


async def test_a_machine_that_is_cut_off_holds_nothing_up(net: Network, run_id: str, tmp_path: Path, model: Path) -> None:
    trainer, other = net.add(), net.add()
    async with redis_on(trainer, tmp_path) as url, cluster(url, run_id, tmp_path / "run", model, [trainer, other]) as made:
        await made.trained(3)
        other.cut()
        made.groups = 5 * GROUPS  # the next iteration waits in a collective
        async with asyncio.timeout(600):
            while "waits for machine 1" not in made.logs():  # noqa: ASYNC110 (a file gives no event)
                await asyncio.sleep(0.2)
        assert not made.pids(RANK="0")
        other.heal()
        await made.done()


def test_machines_that_read_other_weights_do_not_train(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tiny_model("tied", tmp_path / name, seed=seed)
    run_ranks(compare, 2, str(tmp_path))


async def test_the_documented_commands_train_on_two_machines(net: Network, tmp_path: Path) -> None:
    trainer, other = net.add(), net.add()
    config = make_task(tmp_path)
    words = ["trainer.parallel={tensor: 1, data: 2, nodes: 2}", "iterations=3", "eval_samples=8", "rollout.replicas=1"]
    children: dict[str, Child] = {}
    async with redis_on(trainer, tmp_path) as url:

        def start(name: str, machine: Machine, *argv: str) -> None:
            command = machine.command((sys.executable, "-m", "polyreme", *argv, "--redis", url))
            log = tmp_path / f"{name}.log"
            children[name] = Child.spawn(name, command, {"OMP_NUM_THREADS": "1"}, log, signal.SIGTERM)

        try:
            start("rollout", trainer, "rollout")
            start("reward", trainer, "reward")
            start("learner", other, "learner", "--node", "1")
            start("train", trainer, "train", str(config), *words)
            ended = await children["train"].gone(900) and await children["learner"].gone(300)
            logs = "\n".join(child.log_tail(40) for child in children.values())
            assert ended and (children["train"].poll(), children["learner"].poll()) == (0, 0), logs
        finally:
            await asyncio.gather(*(child.stop(30) for child in children.values()))
        redis = await connect(url)
        run = await Run.attach(redis, None, 5)
        assert await run.state() == (RunState.DONE, "")
        assert (await ExperienceLog(run).audit()).clean
        settled = (await run.config()).run_dir
        await redis.aclose()
    assert (settled / "hf" / "iteration-000003" / "model.safetensors").is_file()
    assert (settled / "logs" / "attempt_1" / "learner-node-1.log").stat().st_size
