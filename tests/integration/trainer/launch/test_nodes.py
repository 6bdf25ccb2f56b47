"""Launches of a learner on several machines: real leases in a real Redis, small real processes as agents."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyreme.config.run import RunConfig
from polyreme.config.trainer import ParallelConfig
from polyreme.errors import ConfigError, GateError, RunFailedError, StaleTermError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run, RunState
from polyreme.weights.arena import arena_path
from polyreme_trainer.launch.leader_node import lead
from polyreme_trainer.launch.rendezvous import TIMES, LaunchTimes, MachineError, Machines
from polyreme_trainer.launch.worker_node import serve_launches
from support.configs import run_config
from support.processes import command_line
from support.waiting import until

PLACE = "127.0.0.1:29999"
PRELUDE = """
import os, sys, time
address, launch, node, nodes, ranks, *program = sys.argv[1:]
open(os.environ["NOTES"], "a").write(f"{launch} {node}/{nodes} x{ranks} at {address}: {program}\\n")
"""
WELL, FOREVER = "while open(os.environ['NOTES']).read().count(launch) < int(nodes): time.sleep(0.02)", "time.sleep(600)"
"""An agent that succeeds only if it has met all others."""


@dataclass
class World:
    """A run whose learner is on several machines."""

    run: Run
    config: RunConfig
    url: str
    folder: Path
    stop: asyncio.Event
    times: LaunchTimes = TIMES

    @staticmethod
    def agent(script: str) -> tuple[str, ...]:
        return ("-S", "-c", PRELUDE + script)

    async def lead(self, script: str) -> int:
        return await lead(self.run, self.config, self.url, PLACE, self.folder, ("rank",), self.agent(script), self.times)

    @asynccontextmanager
    async def following(self, node: int, script: str) -> AsyncIterator["asyncio.Task[None]"]:
        """Runs another machine until the block ends."""
        work = serve_launches(self.run, self.config, self.url, node, self.stop, ("rank",), self.agent(script), self.times)
        task = asyncio.create_task(work)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def notes(self) -> list[str]:
        path = self.folder / "notes.txt"
        return path.read_text().splitlines() if path.exists() else []

    async def noted(self, count: int) -> list[str]:
        """Waits for `count` notes of agents and returns them."""
        await until(lambda: len(self.notes()) >= count)
        return self.notes()

    def agents(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if PRELUDE in "".join(command_line(child))]


@pytest.fixture
def world(run: Run, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    """`world(nodes)`: a learner on this number of machines."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.txt"))
    (tmp_path / "model").mkdir()
    for name, text in {"config.json": "{}", "tokenizer.json": "[]"}.items():
        (tmp_path / "model" / name).write_text(text)

    def made(nodes: int) -> World:
        base = run_config(tmp_path)
        trainer = base.trainer.model_copy(update={"parallel": ParallelConfig(tensor=2, data=nodes, nodes=nodes)})
        rollout = base.rollout.model_copy(update={"start_timeout": 600.0})
        config = base.model_copy(update={"trainer": trainer, "rollout": rollout})
        config.run_dir.mkdir(parents=True)
        return World(run, config, redis_url, tmp_path, asyncio.Event())

    return made


def of(node: int, launch: str, **facts: Any) -> Lease:
    """The lease of a learner's machine."""
    return Lease("learner", f"by-hand-{node}", "10.0.0.9", "", 1, {"node": node, "at": time.time(), "launch": launch, **facts})


async def the_call(run: Run) -> Lease:
    async def look() -> Lease | None:
        return await Machines(run).call()

    found = await run.until(look, within=300)
    assert found is not None
    return found


async def test_all_machines_share_a_launch_and_then_the_next(world: Callable[[int], World]) -> None:
    here = world(3)
    async with here.following(2, WELL) as second, here.following(1, WELL) as first:
        for launch in range(2):
            assert await here.lead(WELL) == 0
            found = sorted(await here.noted(3 * launch + 3))
            names = {note.partition(" ")[0] for note in found}
            assert len(names) == launch + 1
            for node in range(3):
                assert sum(f" {node}/3 x2 at {PLACE}: ['rank']" in note for note in found) == launch + 1
        assert not list(here.config.run_dir.glob(".launch-*"))
        await here.run.set_state(RunState.DONE)
        await asyncio.wait_for(asyncio.gather(first, second), 300)


async def test_what_another_machine_says_for_good_ends_the_launch(world: Callable[[int], World]) -> None:
    here = world(2)
    here.times = LaunchTimes(report=300.0)
    script = f"print('learner: error: the replica answers otherwise'); sys.exit({GateError.exit_code})"
    async with here.following(1, script):
        with pytest.raises(MachineError, match=r"the replica answers otherwise.*learner-node-1.log") as failed:
            await here.lead("sys.exit(1)")  # like a rank with a broken connection
    assert failed.value.exit_code == GateError.exit_code
    assert not here.agents()


async def test_the_end_of_a_machines_ranks_ends_all_others(world: Callable[[int], World]) -> None:
    here = world(2)
    here.times = LaunchTimes(back=0.3, report=0.3)
    async with here.following(1, FOREVER):
        assert await here.lead("sys.exit(3)") == 3
        await until(lambda: not here.agents())  # the follower detects the end of the launch
    async with here.following(1, "sys.exit(3)"):
        with pytest.raises(MachineError) as failed:
            await here.lead(FOREVER)
        assert failed.value.exit_code == 1
        assert not here.agents()


async def test_a_machine_that_is_gone_ends_the_launch(world: Callable[[int], World]) -> None:
    here = world(2)
    here.times = LaunchTimes(back=0.3, report=0.2)
    leading = asyncio.create_task(
        lead(here.run, here.config, here.url, "10.0.0.1:9", here.folder, (), here.agent(FOREVER), here.times)
    )
    call = await the_call(here.run)
    await Registry(here.run).register(of(1, call.id, status=None, why=""), ttl=0.5)  # and never renewed
    await here.noted(1)
    with pytest.raises(MachineError, match=r"machine 1 \(10.0.0.9\).*expired lease"):
        await asyncio.wait_for(leading, 300)
    assert not here.agents()


async def test_a_lease_that_comes_back_in_time_is_not_gone(world: Callable[[int], World]) -> None:
    seen = Machines(world(2).run, LaunchTimes(back=0.0))
    assert not seen.is_lost("a", present=False)
    assert not seen.is_lost("a", present=True)
    assert not seen.is_lost("a", present=False)
    assert seen.is_lost("a", present=False)


async def test_a_dead_machines_lease_is_not_asked_again(world: Callable[[int], World]) -> None:
    here = world(2)
    await Registry(here.run).register(of(1, "an-older-launch", status=None, why=""))  # killed a moment ago
    async with here.following(1, WELL):
        assert await here.lead(WELL) == 0
    assert len(here.notes()) == 2


async def test_missing_machines_are_reported_and_awaited(world: Callable[[int], World]) -> None:
    here = world(3)
    here.times = LaunchTimes(notice=1.0)
    impatient = here.config.rollout.model_copy(update={"start_timeout": 2.0})
    here.config = here.config.model_copy(update={"rollout": impatient})
    async with here.following(1, WELL):
        with pytest.raises(UnavailableError, match=r"machine 2 .*--node 2"):
            await here.lead(WELL)
    notices = [record["text"] for _, record in await here.run.records("0", 0) if record["kind"] == "notice"]
    assert len(notices) == 1 and "machine 2" in notices[0] and "polyreme learner --node 2" in notices[0]
    assert not here.notes()


async def test_a_stop_ends_the_wait(world: Callable[[int], World]) -> None:
    here = world(2)
    leading = asyncio.create_task(here.lead(WELL))
    await the_call(here.run)
    await here.run.set_state(RunState.DRAINING)
    assert await asyncio.wait_for(leading, 300) == 0


async def test_another_file_system_or_model_is_an_error(world: Callable[[int], World]) -> None:
    here = world(2)
    here.times = LaunchTimes(files=0.1)
    elsewhere = here.config.model_copy(update={"output_dir": here.folder / "elsewhere"})
    following = asyncio.create_task(serve_launches(here.run, elsewhere, here.url, 1, here.stop, (), here.agent(WELL), here.times))
    with pytest.raises(MachineError, match=r"\.launch-learner-0-.*one file system") as failed:
        await here.lead(WELL)
    assert failed.value.exit_code == ConfigError.exit_code
    here.stop.set()
    await asyncio.wait_for(following, 300)
    here.stop.clear()
    (here.folder / "model" / "tokenizer.json").write_text("[1]")
    async with here.following(1, WELL):
        with pytest.raises(MachineError, match="the run's model at"):
            await here.lead(WELL)
    assert not here.notes()


async def test_a_newer_launch_takes_the_place_of_one_whose_leader_is_gone(world: Callable[[int], World]) -> None:
    here = world(2)
    registry = Registry(here.run)

    async def call(name: str) -> None:
        (here.config.run_dir / f".launch-{name}").touch()
        facts = {"node": 0, "at": time.time(), "log_dir": str(here.folder), "members": []}
        keeper = await registry.register(Lease("learner", name, PLACE, "", 1, facts))

        async def answered() -> Lease | None:
            return (await Machines(here.run).answers(name)).get(1)

        answer = await here.run.until(answered, within=300)
        assert answer is not None
        await keeper.update({"members": [answer.id]})

    async with here.following(1, FOREVER):
        await call("first")  # its leader is killed: the lease stays for its ttl
        await here.noted(1)
        await call("second")
        assert [note.partition(" ")[0] for note in await here.noted(2)] == ["first", "second"]
        [agent] = here.agents()
        assert "second" in agent.cmdline()
        here.stop.set()
        await until(lambda: not here.agents())


async def test_the_order_of_launches_does_not_depend_on_the_machines_clocks(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(2)
    registry = Registry(here.run)
    facts = {"node": 0, "at": await registry.now(), "log_dir": str(here.folder), "members": []}
    await registry.register(Lease("learner", "killed", PLACE, "", 1, facts), ttl=600)
    monkeypatch.setattr("time.time", lambda: 1e9)  # of the machine that leads now
    leading = asyncio.create_task(here.lead(WELL))
    await until(lambda: any(here.config.run_dir.glob(".launch-learner-*")))  # before its lease, so that only the order decides
    async with here.following(1, WELL):
        assert await asyncio.wait_for(leading, 300) == 0


async def test_no_shared_memory_outlives_a_machine(world: Callable[[int], World]) -> None:
    here = world(2)
    arena = arena_path(here.run.run_id, 1)
    rank = f"""
import fcntl
agent = os.getpid()
if os.fork() == 0:  # a rank: it notices the death of its agent
    os.setsid()
    arena = open({str(arena)!r}, "w")
    fcntl.flock(arena, fcntl.LOCK_EX)
    open({str(here.folder / "locked")!r}, "w").close()
    while os.getppid() == agent: time.sleep(0.05)
    os._exit(0)
time.sleep(600)
"""
    async with here.following(1, rank) as following:
        leading = asyncio.create_task(here.lead(FOREVER))
        await until((here.folder / "locked").exists)
        assert arena.exists()
        here.stop.set()
        await asyncio.wait_for(following, 300)
        assert not arena.exists()
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def test_a_leader_whose_machines_follow_another_is_over(world: Callable[[int], World]) -> None:
    here = world(2)
    here.times = LaunchTimes(back=0.3, report=0.2)
    async with here.following(1, FOREVER):
        first = asyncio.create_task(here.lead(FOREVER))
        await here.noted(2)
        second = asyncio.create_task(here.lead(FOREVER))
        with pytest.raises(StaleTermError, match=r"machine 1 in launch learner-0-.* of another"):
            await asyncio.wait_for(first, 300)
        assert len(await here.noted(4)) == 4
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_a_trainer_on_loopback_cannot_be_reached(world: Callable[[int], World]) -> None:
    here = world(2)
    leading = asyncio.create_task(here.lead(WELL))
    call = await the_call(here.run)
    await Registry(here.run).register(of(1, call.id, status=None, why=""))
    with pytest.raises(ConfigError, match=r"machine 1 .10.0.0.9. can reach; found 127.0.0.1:29999.*--advertise"):
        await asyncio.wait_for(leading, 300)


async def test_a_follower_ends_with_the_run_and_knows_its_number(world: Callable[[int], World]) -> None:
    here = world(2)
    with pytest.raises(ConfigError, match="--node from 1 to 1; found 2"):
        await serve_launches(here.run, here.config, here.url, 2, here.stop)
    with pytest.raises(ConfigError, match="nodes above 1; found 1"):
        await serve_launches(here.run, run_config(here.folder), here.url, 1, here.stop)
    async with here.following(1, WELL) as following:
        await here.run.set_state(RunState.FAILED, "no replica is left")
        with pytest.raises(RunFailedError, match="no replica is left"):
            await asyncio.wait_for(following, 300)


async def test_the_command_ends_with_the_runs_reason(run: Run, redis_url: str) -> None:
    command = (sys.executable, "-m", "polyreme", "learner", "--redis", redis_url, "--run", run.run_id)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == ConfigError.exit_code
    assert "polyreme: error: expected trainer.parallel.nodes above 1; found 1." in said.decode()
