"""The learner's side of the device lease: its thread, a start after the replicas, and an ended grant."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run, RunState
from polyreme.experience.scripts import StaleGrantError
from polyreme.experience.store import connect
from polyreme_trainer.learner.device_turns import LearnerTurns, LeaseThread
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.run_client import DrainError
from support.configs import run_config

T = TypeVar("T")
Do = Callable[[Callable[[Run], Awaitable[T]]], T]


@pytest.fixture
def do(redis_url: str, run_id: str, tmp_path: Path) -> Do[Any]:
    """Runs an operation on the colocated run from outside the learner."""
    created: list[int] = []

    async def main(action: Callable[[Run], Awaitable[Any]]) -> Any:
        redis = await connect(redis_url)
        try:
            if not created:
                created.append((await Run.create(redis, run_id, run_config(tmp_path, placement="colocated"), {})).start)
            run = Run(redis, run_id)
            run.start = 1
            return await action(run)
        finally:
            await redis.aclose()

    return lambda action: asyncio.run(main(action))


@pytest.fixture
def turns(do: Do[Any], redis_url: str, run_id: str, tmp_path: Path) -> Iterator[LearnerTurns]:
    do(register)
    ranks = Ranks()
    with LearnerTurns(run_config(tmp_path, placement="colocated"), redis_url, run_id, ranks) as turns:
        yield turns
    ranks.close()


async def register(run: Run) -> None:
    """Registers a replica that outlives the test."""
    await Registry(run).register(Lease("rollout", "r", "h:1", "", 1), ttl=1000.0)


async def holders(run: Run) -> list[str]:
    names = [name.decode() for name in await run.redis.hkeys(run.key("device"))]
    return sorted(name.partition(":")[0] for name in names if name != "counter")


def test_turns_change_hands(turns: LearnerTurns, do: Do[Any]) -> None:
    assert turns.take() and not turns.take()
    assert do(holders) == ["train"]
    assert turns.give_up() and not turns.give_up()
    assert do(holders) == []


def test_a_learner_that_ends_with_the_devices_does_not_give_them_up_before_its_memory_is_freed(
    turns: LearnerTurns, do: Do[Any]
) -> None:
    turns.take()
    turns.close()
    assert do(holders) == ["train"]  # until the deadline


def test_a_learner_that_ends_while_it_waits_for_the_devices_leaves_no_claim(turns: LearnerTurns, do: Do[Any]) -> None:
    async def generate(run: Run) -> None:
        assert await DeviceLease(run, "generate", "r", ttl=1000.0).ask() is not None

    do(generate)
    turns._ranks.on_leader(lambda: turns._lease._ask(turns._lease._lease.ask()))
    assert do(holders) == ["generate", "train"]
    turns.close()
    assert do(holders) == ["generate"]


def test_a_learner_whose_grant_has_ended_publishes_nothing(turns: LearnerTurns, do: Do[Any]) -> None:
    turns.take()

    async def end(run: Run) -> None:
        """Ends the grant, as if the learner had been stopped for too long and a replica had acquired the devices."""
        [field] = [name for name in await run.redis.hkeys(run.key("device")) if name.startswith(b"train:")]
        await run.redis.hdel(run.key("device"), field)
        assert await DeviceLease(run, "generate", "r", ttl=1000.0).ask() is not None

    do(end)
    with pytest.raises(StaleGrantError):
        turns._ranks.on_leader(turns.check)
    with pytest.raises(StaleGrantError):
        turns.give_up()
    assert do(holders) == ["generate"]


def test_a_run_that_drains_before_its_replicas_come_ends_the_wait(
    do: Do[Any], redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(holders)  # creates the run
    waits, wait_for_replicas = threading.Event(), LeaseThread._wait_for_replicas

    async def wait(self: LeaseThread, seconds: float) -> None:
        waits.set()
        await wait_for_replicas(self, seconds)

    monkeypatch.setattr(LeaseThread, "_wait_for_replicas", wait)
    ranks = Ranks()
    colocated = run_config(tmp_path, placement="colocated")

    async def drain_meanwhile(turns: LearnerTurns) -> None:
        taking = asyncio.ensure_future(turns._lease.take())
        assert await asyncio.to_thread(waits.wait, 300)
        redis = await connect(redis_url)
        run = Run(redis, run_id)
        run.start = 1
        await run.set_state(RunState.DRAINING)
        await redis.aclose()
        await taking

    with LearnerTurns(colocated, redis_url, run_id, ranks) as turns, pytest.raises(DrainError):
        ranks.on_leader(lambda: drain_meanwhile(turns))
    ranks.close()


def test_separate_devices_need_no_turns(tmp_path: Path) -> None:
    ranks = Ranks()
    with LearnerTurns(run_config(tmp_path), "redis://127.0.0.1:1", "none", ranks) as turns:
        assert not turns.take() and not turns.give_up() and turns.held
    ranks.close()
