"""Replicas that are lost during the learner's comparison with them: real Redis, pushes and gRPC, simulated engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polyreme.config.run import RunConfig
from polyreme.errors import UnavailableError
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import RunState
from polyreme.net import rpc
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import TensorSpec, plan_manifest
from polyreme_rollout.testing.simulated_engine import Failures
from polyreme_trainer.learner import gates
from polyreme_trainer.learner.run_client import Answers, DrainError, RunClient
from polyreme_trainer.weight_sync.publisher import Publisher
from support.publishing import push_soon
from support.simulated import ROWS, Replica, config_tree, make_run, simulated_replica

LAYOUT = plan_manifest([TensorSpec("weight", "F32", (4,))])
SILENT = Failures(silent_after=0)


@dataclass
class Start:
    """A learner that has published version 0, and the replicas of its run."""

    client: RunClient
    publisher: Publisher
    config: RunConfig
    replicas: AsyncExitStack

    async def replica(self, name: str, **engine: Any) -> Replica:
        return await self.replicas.enter_async_context(simulated_replica(self.client.run, name, **engine))

    def compare(self) -> "asyncio.Task[tuple[Answers, Answers]]":
        return asyncio.create_task(self.client.replica_answers(self.publisher, 0, self.config))

    async def notice(self) -> str:
        """Waits for the first notice."""
        async with asyncio.timeout(300):
            while not (texts := await self.notices()):  # noqa: ASYNC110 (it is read from a stream)
                await asyncio.sleep(0.02)
        return texts[0]

    async def notices(self) -> list[str]:
        records = [record for _, record in await self.client.run.records("0", 0)]
        return [record["text"] for record in records if record["kind"] == "notice" and "compared" in record["text"]]


@pytest.fixture
async def start(
    request: pytest.FixtureRequest, redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> AsyncIterator[Start]:
    """A run with the number of replicas of the parameter, by default 1."""
    config = config_tree(tmp_path, ROWS, rollout={"replicas": getattr(request, "param", 1), "chunk_timeout": 3600.0})
    run = await make_run(redis, run_id, config)
    experience = ExperienceLog(run)
    term = await experience.take(Writer.LEARNER)
    arena = Arena.create(run_id, LAYOUT.nbytes)
    publisher = Publisher(redis_url, run_id, term, arena, push_soon())
    publisher.start()
    async with AsyncExitStack() as replicas:
        slot = await publisher.acquire_slot(300)
        arena.begin(slot)
        generation = arena.complete(slot, 0, term.counter)
        await experience.begin(0)
        publisher.publish(seal(LAYOUT.stamped(run_id, term.counter, 0), arena.slot_view(slot)), slot, generation)
        yield Start(RunClient(run, experience, term, state_seconds=0.05, again_seconds=0.1), publisher, config, replicas)
        publisher.close()
    arena.close()


def of_replicas(answers: tuple[Answers, Answers], count: int) -> bool:
    """Whether the answers of `count` replicas are complete."""
    greedy, sampled = answers
    whole = all(len(answer.response) == len(answer.logprobs) > 0 for answer in greedy + sampled)
    return whole and (len(greedy), len(sampled)) == (gates.PROMPTS * count, gates.PROMPTS * gates.SAMPLES * count)


@pytest.mark.parametrize("start", [2], indirect=True)
async def test_every_replica_is_asked(start: Start) -> None:
    await start.replica("a")
    await start.replica("b")
    assert of_replicas(await start.compare(), 2)
    assert await start.notices() == []


@pytest.mark.parametrize("start", [2], indirect=True)
async def test_one_that_dies_while_it_is_asked_is_left_out(start: Start) -> None:
    dies = await start.replica("dies", failures=SILENT)
    await start.replica("stays")
    comparing = start.compare()
    await dies.asked.wait()
    await dies.vanish()
    assert of_replicas(await asyncio.wait_for(comparing, 300), 1)
    [told] = await start.notices()
    assert "replica dies at " in told


@pytest.mark.parametrize("start", [2], indirect=True)
async def test_one_that_stands_still_is_left_out_when_its_lease_goes(start: Start) -> None:
    still = await start.replica("still", failures=SILENT)
    await start.replica("stays")
    comparing = start.compare()
    await still.asked.wait()
    await still.lose_lease()
    assert of_replicas(await asyncio.wait_for(comparing, 300), 1)
    [told] = await start.notices()
    assert "its lease" in told


def with_rollout(config: RunConfig, **changes: float) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


@pytest.mark.parametrize("start", [2], indirect=True)
async def test_one_that_is_silent_is_left_out_although_its_lease_lives(start: Start) -> None:
    start.config = with_rollout(start.config, chunk_timeout=3.0)
    await start.replica("mute", failures=SILENT)
    await start.replica("stays")
    assert of_replicas(await asyncio.wait_for(start.compare(), 300), 1)
    [told] = await start.notices()
    assert "no token within 3" in told


async def test_the_only_one_that_drains_after_its_commit_is_waited_for_in_its_successor(start: Start) -> None:
    drains = await start.replica("drains")
    await start.publisher.wait_committed(0, 1, 300)
    drains.service.drain()
    comparing = start.compare()
    await start.notice()
    await drains.vanish()
    assert not comparing.done()
    await start.replica("next")
    assert of_replicas(await asyncio.wait_for(comparing, 300), 1)


async def test_the_only_one_that_is_killed_is_waited_for_in_its_successor(start: Start) -> None:
    killed = await start.replica("killed", failures=SILENT)
    comparing = start.compare()
    await killed.asked.wait()
    await killed.die()
    await start.replica("next")
    assert of_replicas(await asyncio.wait_for(comparing, 300), 1)


async def test_a_channel_that_closes_during_the_calls_is_a_replica_lost(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    channels, connect = [], rpc.connect
    monkeypatch.setattr(rpc, "connect", lambda *arguments: channels.append(connect(*arguments)) or channels[-1])
    asked = await start.replica("asked", failures=SILENT)
    await start.publisher.wait_committed(0, 1, 300)
    channels.clear()  # the publisher's
    comparing = start.compare()
    await asked.asked.wait()
    await channels[0].close()
    assert "channel closed" in await start.notice()
    assert not comparing.done()
    comparing.cancel()
    await asyncio.wait({comparing})
    assert comparing.cancelled()


async def test_without_a_successor_the_start_fails_in_time_with_the_reason(start: Start) -> None:
    start.config = with_rollout(start.config, chunk_timeout=0.5, start_timeout=1.5)
    await start.replica("mute", failures=SILENT)
    await start.publisher.wait_committed(0, 1, 300)
    with pytest.raises(UnavailableError, match="mute: no token within"):
        await asyncio.wait_for(start.compare(), 300)


async def test_a_run_that_drains_waits_for_no_replica(start: Start) -> None:
    start.config = with_rollout(start.config, chunk_timeout=0.5)
    await start.replica("mute", failures=SILENT)
    comparing = start.compare()
    await start.notice()
    await start.client.run.set_state(RunState.RUNNING)
    await start.client.run.set_state(RunState.DRAINING)
    with pytest.raises(DrainError):
        await asyncio.wait_for(comparing, 300)
