"""Random kills of every process of a training service under three clients: no exception in a client, and the bits of an undisturbed service.

Each test prints its seed; POLYREME_FAULT_SEED=N repeats one.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.net.ports import free_port, loopback
from support.nursery import Born, Nursery
from support.service import three_tenants
from support.simulated_service import BASE

PARTS = ("api", "learner", "sampler")
MODULE = "support.simulated_service"


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    opened = await Nursery.open([MODULE])
    yield opened
    await opened.close()


class Processes:
    """The processes of a simulated service, each of which is started again as soon as it has ended."""

    def __init__(self, nursery: Nursery, redis: EmbeddedServer, folder: Path) -> None:
        self._nursery, self._redis, self._folder, self._port = nursery, redis, folder, free_port()
        self._born: dict[str, Born] = {}
        self.url = f"http://{loopback()}:{self._port}"

    async def keep(self, part: str) -> None:
        arguments = (part, "storm", str(self._folder / "models"), str(self._port))
        environment = {"SERVICE_REDIS": self._redis.url}
        while True:
            born = await self._nursery.spawn(MODULE, arguments, environment, self._folder / f"{part}.log")
            self._born[part] = born
            await born.over.wait()
            assert born.status == -signal.SIGKILL, (self._folder / f"{part}.log").read_text()[-5000:]

    async def kill(self, part: str) -> None:
        if part != "redis":
            self._born[part].signal(signal.SIGKILL)
            return
        os.kill(self._redis.pid, signal.SIGKILL)
        while self._redis.alive:  # noqa: ASYNC110 (a process end is no event)
            await asyncio.sleep(0.005)
        await self._redis.restart()


@asynccontextmanager
async def processes(nursery: Nursery, folder: Path) -> AsyncIterator[Processes]:
    redis = await EmbeddedServer.open(folder / "redis")
    try:
        started = Processes(nursery, redis, folder)
        keeping = [asyncio.create_task(started.keep(part)) for part in PARTS]
        try:
            yield started
        finally:
            failed = [task for task in keeping if task.done()]
            for task in keeping:
                task.cancel()
            await asyncio.gather(*(set(keeping) - set(failed)), return_exceptions=True)
        for task in failed:
            task.result()  # raises
    finally:
        redis.stop()


async def endure(nursery: Nursery, folder: Path, seed: int, kills: int) -> None:
    rng, end = random.Random(seed), folder / "end"
    print(f"seed {seed}")
    async with processes(nursery, folder / "storm") as service:
        program = three_tenants(service.url, BASE, folder / "storm", str(end))
        await program.wait_for("2 0")
        for _ in range(kills):
            await service.kill(rng.choice((*PARTS, "redis")))
            await asyncio.sleep(rng.expovariate(1 / 0.2))
        end.touch()
        lost: Any = await asyncio.to_thread(program.result)
    async with processes(nursery, folder / "quiet") as service:
        steps = [str(len(each["losses"])) for each in lost]
        kept: Any = await asyncio.to_thread(three_tenants(service.url, BASE, folder / "quiet", *steps).result)
    assert [len(each["losses"]) > 1 for each in lost] == [True] * 3
    assert lost == kept


def seed_of(default: int) -> int:
    return int(os.environ.get("POLYREME_FAULT_SEED", default))


async def test_thirty_kills_cost_three_clients_nothing(nursery: Nursery, tmp_path: Path) -> None:
    await endure(nursery, tmp_path, seed_of(1), 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
async def test_hundreds_of_kills_cost_three_clients_nothing(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    await endure(nursery, tmp_path, seed_of(seed), 300)
