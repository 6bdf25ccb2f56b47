"""Random faults during a whole simulated run: whichever processes are killed, stopped or disconnected, the run finishes with an intact log.

Each test prints its seed and schedule; POLYREME_FAULT_SEED=N repeats one.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import RunState
from support.driver import Storm
from support.faults import IN_EPISODES, PHASES, Fault, kills, schedule
from support.finished import replayed, trained_episodes
from support.nursery import Nursery
from support.storms import MODULES, REAL_REPLICAS, real_storm, simulated_storm, start_supervisor
from support.verdicts import last_trained, records, table, verdict, weights_verdict
from support.waiting import until

DIRECT = ("redis", "orchestrator", "learner", "rollout", "reward")
PLAYING = ("redis", "orchestrator", "learner", "rollout", "environment", "worker")
KILLED = ("environment", "worker", "address", "rollout", "orchestrator", "redis")
TRAIN_SECONDS = 0.03
Draw = Callable[..., tuple[int, list[Fault]]]


def seed_of(default: int) -> int:
    return int(os.environ.get("POLYREME_FAULT_SEED", default))


def drawn(seed: int, count: int, supervised: bool, pace: float, **kind: Any) -> tuple[int, list[Fault]]:
    """A run's iterations, about as many as there are faults, and its faults."""
    direct = PLAYING if "environment" in kind else DIRECT
    victims = (*direct, "supervisor") if supervised else direct
    iterations = max(8, int((1.2 if kind.get("max_staleness") else 0.55) * count))
    return iterations, schedule(seed, count, 3, victims, pace, drafts="step_seconds" in kind)


def killed(seed: int, count: int, supervised: bool, pace: float, **kind: Any) -> tuple[int, list[Fault]]:
    """The same of kills in mid-episode."""
    return max(12, count // 2), kills(seed, count, 3, KILLED, IN_EPISODES, pace)


async def endure(
    nursery: Nursery, folder: Path, seed: int, count: int, supervised: bool, pace: float, draw: Draw, **kind: Any
) -> Storm:
    """Runs with `count` faults, or fewer if the run finishes earlier, and then without faults to the end."""
    iterations, faults = draw(seed, count, supervised, pace, **kind)
    print(f"seed {seed}:", *faults, sep="\n  ")
    fixed = {"iterations": iterations, "supervised": supervised, "train_seconds": TRAIN_SECONDS}
    async with simulated_storm(nursery, folder, seed, **fixed, **kind) as s:
        await s.rage(faults)
        await s.calm()
        if not supervised:
            await s.end("orchestrator")
            await s.end("learner")
            await start_supervisor(s, TRAIN_SECONDS)
        wrong = await verdict(s, await s.wait(900.0), iterations) + await weights_verdict(s, iterations)
        if "environment" in kind:
            wrong += replayed(s.finished, trained_episodes(folder / "run" / "samples"))
            print(f"{len(s.finished)} finished episodes were in the log when an orchestrator was killed")
        if "tokens_per_iteration" in kind.get("rollout", {}) and not await samples_continued(s):
            wrong.append("no trained sample had paused")
        print(*s.notes, sep="\n")
        assert not wrong, "\n".join([f"seed {seed}", *wrong])
    return s


async def samples_continued(s: Storm) -> bool:
    paused = sum(record["rollout/paused_samples"] for record in await records(s.run, "rollout"))
    return paused > 0 and any(record["partial/carried_samples"] for record in await records(s.run, "iteration"))


async def endure_all(
    folder: Path, seed: int, count: int, per_run: int, supervised: bool, pace: float = 0.1, draw: Draw = drawn, **kind: Any
) -> list[Storm]:
    """Repeats runs with different seeds until there were `count` faults."""
    storms: list[Storm] = []
    nursery = await Nursery.open(MODULES)
    try:
        while (left := count - sum(sum(s.done.values()) for s in storms)) > 0:
            number = len(storms)
            own = seed if number == 0 else random.Random(f"{seed} {number}").randrange(1 << 31)
            storms.append(await endure(nursery, folder / str(number), own, min(per_run, left), supervised, pace, draw, **kind))
    finally:
        await nursery.close()
        print(table(storms))
    return storms


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow, id="random")]
)
async def test_faults_in_every_phase(tmp_path: Path, seed: int | None) -> None:
    own = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    await endure_all(tmp_path, seed_of(own), 10, 10, supervised=False)


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_faults_with_several_orchestrators(tmp_path: Path, count: int) -> None:
    """A fault strikes any of three."""
    trainer = {"save_interval": 3, "max_restarts": 1000, "orchestrators": 3}
    await endure_all(tmp_path, seed_of(700), count, 50, supervised=True, max_staleness=1, trainer=trainer)


async def test_faults_in_mid_episode(tmp_path: Path) -> None:
    await endure_all(tmp_path, seed_of(500), 8, 8, supervised=False, environment={}, max_staleness=1)


async def kill_in_mid_episode(folder: Path, count: int, pace: float, step_seconds: float) -> list[Storm]:
    agents = {"environment": {"function": "run"}, "max_staleness": 1, "step_seconds": step_seconds}
    storms = await endure_all(folder, seed_of(600), count, 50, supervised=False, pace=pace, draw=killed, **agents)
    assert {victim for storm in storms for victim, _ in storm.done} == {*KILLED}
    return storms


async def test_kills_in_mid_episode(tmp_path: Path) -> None:
    await kill_in_mid_episode(tmp_path, 12, pace=0.2, step_seconds=0.01)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_two_hundred_kills_in_mid_episode(tmp_path: Path) -> None:
    """Groups take seconds. What was finished when an orchestrator was killed is trained as it was."""
    storms = await kill_in_mid_episode(tmp_path, 200, pace=1.5, step_seconds=0.04)
    assert any(storm.finished for storm in storms)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("environment", [{}, {"function": "run"}], ids=["class", "agent"])
async def test_a_storm_of_faults_in_mid_episode(tmp_path: Path, environment: dict[str, Any]) -> None:
    """Environment server, its workers and its address (which an agent's requests reach), replicas, orchestrator, learner and Redis."""
    await endure_all(tmp_path, seed_of(501), 100, 50, supervised=False, environment=environment, max_staleness=1)


async def test_a_stopped_replica_delays_no_other_and_comes_back(tmp_path: Path) -> None:
    """A replica is stopped for longer than its lease, during samples and a weight push."""
    nursery = await Nursery.open(MODULES)
    try:
        async with simulated_storm(nursery, tmp_path / "run", 0, iterations=10_000, supervised=False, rare=0) as s:
            await s.running(600.0)
            replicas = {lease.id for lease in await Registry(s.run).wait_for("rollout", 3, 300)}
            begin, before = time.monotonic(), s.appends
            await until(lambda: s.appends > before + 10)
            seconds = 9.0 + 5 * (time.monotonic() - begin)  # on a fast machine its lease has not expired yet
            await s.rage([Fault("chunk", "after", 0.03, "rollout-0", "stop", seconds + 3.0, 0.0)])
            before = s.appends
            await asyncio.sleep(seconds)
            assert s.appends > before + 10
            await s.calm()
            newest = await ExperienceLog(s.run).version()

            async def all_serve() -> bool:
                return replicas == {r["replica"] for r in await records(s.run, "commit") if r["version"] > newest}

            await until(all_serve)
            assert not s.problems
            assert (await ExperienceLog(s.run).audit()).clean
    finally:
        await nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_servers_that_leave_take_no_group_along(tmp_path: Path) -> None:
    """Many answers take long, and no other process dies, whose successor would recover lost groups."""
    faults = [Fault("score", "after", 0.5, victim, action, away, gap) for victim, action, away, gap in (
        ("reward", "term", 0.1, 1.0), ("rollout-0", "term", 0.1, 1.0), ("reward", "term", 0.3, 2.0), ("reward", "stop", 14.0, 8.0),
        ("reward", "term", 0.0, 15.0), ("rollout-1", "term", 0.3, 1.0), ("reward", "cut", 2.0, 1.0), ("reward", "term", 0.1, 4.0),
    )]  # fmt: skip
    nursery = await Nursery.open(MODULES)
    try:
        async with simulated_storm(
            nursery, tmp_path / "run", 0, iterations=40, supervised=True, max_staleness=1, rare=30
        ) as s:  # fmt: skip
            await s.running(600.0)
            assert await s.rage(faults) == len(faults)
            await s.calm()
            wrong = await verdict(s, await s.wait(900.0), 40) + await weights_verdict(s, 40)
            assert not wrong, "\n".join([*wrong, *s.notes])
            print(table([s]))
    finally:
        await nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_redis_stands_still_for_20_seconds_and_is_killed(tmp_path: Path) -> None:
    faults = [Fault(phase, "after", 0.01, "redis", action, away, 1.0) for phase, action, away in (
        ("generate", "stop", 20.0), ("train", "kill", 0.5), ("append", "stop", 20.0), ("plan", "kill", 3.0),
    )]  # fmt: skip
    nursery = await Nursery.open(MODULES)
    try:
        async with simulated_storm(nursery, tmp_path / "run", 0, iterations=30, supervised=True) as s:
            await s.running(600.0)
            await s.rage(faults)
            await s.calm()
            wrong = await verdict(s, await s.wait(900.0), 30) + await weights_verdict(s, 30)
            assert not wrong, "\n".join([*wrong, *s.notes])
            assert not await records(s.run, "alarm")
    finally:
        await nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("default", range(6))
async def test_a_storm_of_faults(tmp_path: Path, default: int) -> None:
    await endure_all(tmp_path, seed_of(default), 150, 150, supervised=False, max_staleness=(0, 1, 4)[default % 3])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_storm_of_faults_around_a_supervisor(tmp_path: Path, staleness: int) -> None:
    await endure_all(tmp_path, seed_of(100 + staleness), 60, 60, supervised=True, max_staleness=staleness)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_storm_of_faults_over_groups_that_last(tmp_path: Path) -> None:
    """Groups take seconds, so that a takeover continues from partial rollouts."""
    await endure_all(tmp_path, seed_of(200), 60, 60, supervised=False, pace=0.6, step_seconds=0.1, max_staleness=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_storm_of_faults_over_samples_that_pause(tmp_path: Path) -> None:
    """With a token budget, so that a sample of 64 tokens has up to three parts."""
    rollout = {"start_timeout": 600.0, "chunk_timeout": 5.0, "max_new_tokens": 64, "tokens_per_iteration": 24}
    await endure_all(tmp_path, seed_of(400), 60, 60, supervised=False, max_staleness=2, rollout=rollout)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(5400)
async def test_faults_in_every_part_of_the_real_stack(tmp_path: Path) -> None:
    """Two vLLM replicas, megatron-core on two tensor ranks, and asynchrony. A killed learner must reproduce the same numbers."""
    seed, iterations = seed_of(300), 900
    faults = schedule(seed, 30, REAL_REPLICAS, (*DIRECT, "supervisor"), pace=6.0)
    faults = [replace(fault, action="kill" if fault.action == "usurp" else fault.action) for fault in faults]
    faults.insert(15, Fault("plan", "after", 0.0, "redis", "stop", 20.0, 4.0))
    print(f"seed {seed}:", *faults, sep="\n  ")
    nursery = await Nursery.open(MODULES)
    try:
        async with real_storm(nursery, tmp_path / "real", seed, iterations) as s:
            await s.running(600.0)
            done = await s.rage(faults)
            await s.calm()
            wrong = await verdict(s, await s.wait(900.0), iterations)
            print(table([s]))
            assert not wrong, "\n".join([f"seed {seed}", *wrong, *s.notes])
            assert done >= 30
            assert {phase for _, phase in s.done} >= PHASES.keys() - {"draft"}
    finally:
        await nursery.close()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(5400)
async def test_kills_in_mid_episode_on_the_real_stack(tmp_path: Path) -> None:
    """Two vLLM replicas, megatron-core on two tensor ranks, and agents. The run is stopped after its kills."""
    seed = seed_of(700)
    faults = kills(seed, 20, REAL_REPLICAS, KILLED, IN_EPISODES, pace=4.0)
    print(f"seed {seed}:", *faults, sep="\n  ")
    nursery = await Nursery.open(MODULES)
    try:
        async with real_storm(nursery, tmp_path / "real", seed, 100_000, agents=True) as s:
            await s.running(600.0)
            assert await s.rage(faults) == 20
            await s.calm()
            after = await last_trained(s.run)

            async def goes_on() -> bool:
                return await last_trained(s.run) >= after + 2

            await until(goes_on, 600.0)
            s.stop()
            state, trained = await s.wait(900.0), await last_trained(s.run)
            wrong = await verdict(s, RunState.DONE if state is RunState.STOPPED else state, trained)
            wrong += replayed(s.finished, trained_episodes((await s.run.config()).run_dir / "samples"))
            print(table([s]), *s.notes, f"{trained} iterations", sep="\n")
            assert not wrong, "\n".join([f"seed {seed}", *wrong])
            assert {victim for victim, _ in s.done} == {*KILLED}
    finally:
        await nursery.close()
