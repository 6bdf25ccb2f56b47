import asyncio
import json
from pathlib import Path

import pytest

from polyreme.errors import RunFailedError, UnavailableError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connect
from support.configs import run_config
from support.waiting import until


def lease(name: str, **facts: object) -> Lease:
    return Lease("rollout", name, "127.0.0.1:1", "127.0.0.1:2", 1, dict(facts))


async def test_a_lease_lives_as_long_as_its_block(run: Run) -> None:
    registry = Registry(run)
    async with await registry.register(lease("b", slots=3)), await registry.register(lease("a")):
        assert await registry.leases("rollout") == [lease("a"), lease("b", slots=3)]
        assert await registry.leases("reward") == []
    assert await registry.leases("rollout") == []


async def test_renewal_outlives_the_ttl_and_death_does_not(run: Run, redis_server: EmbeddedServer) -> None:
    registry, operator = Registry(run), await connect(redis_server.url)
    await registry.register(lease("dead"), ttl=0.3)  # registered, and never renewed
    lives = await operator.pttl(run.key("lease:rollout:dead"))

    async def renewed() -> bool:
        """Whether its remaining lifetime has grown since the last call."""
        nonlocal lives
        before, lives = lives, await operator.pttl(run.key("lease:rollout:alive"))
        return bool(before < lives)

    async def alone() -> bool:
        return await registry.leases("rollout") == [lease("alive")]

    async with await registry.register(lease("alive"), ttl=1.5):
        assert await renewed()  # its ttl is longer
        await until(renewed)
        await until(alone)
    await operator.aclose()
    assert await run.redis.smembers(run.key("leases:rollout")) == set()


async def test_renewals_learn_the_learners_term(run: Run) -> None:
    registry = Registry(run)
    async with await registry.register(lease("a"), ttl=0.15):
        assert registry.learner_term == 0
        await ExperienceLog(run).take(Writer.LEARNER)
        await ExperienceLog(run).take(Writer.LEARNER)
        await until(lambda: registry.learner_term == 2)


async def test_a_lease_comes_back_after_a_failover(tmp_path: Path) -> None:
    """The new primary refuses renewals until it has a replica, for longer than the lease's ttl and the client's retries."""
    with EmbeddedServer.start(tmp_path / "redis") as server:
        async with await connect(server.url) as redis:
            run = await Run.create(redis, "failing-over", run_config(tmp_path), {})

            async def there() -> bool:
                return bool(await redis.exists(run.key("lease:rollout:a")))

            async def gone() -> bool:
                return not await there()

            async with await Registry(run).register(lease("a"), ttl=0.3):
                redis.reconnect_timeout = 0.1
                await redis.config_set("min-replicas-to-write", "1")
                await until(gone)
                await asyncio.sleep(0.2)  # waits for some refused renewals
                await redis.config_set("min-replicas-to-write", "0")
                await until(there)


async def test_facts_can_change(run: Run) -> None:
    registry = Registry(run)
    async with await registry.register(lease("a", version=1, engine="x")) as keeper:
        await keeper.update({"version": 2})
        assert await registry.leases("rollout") == [lease("a", version=2, engine="x")]


async def test_a_slow_renewal_does_not_bring_old_facts_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, call, slow, updating = Registry(run), run.scripts.call, asyncio.Event(), asyncio.Event()
    keeper = await registry.register(lease("a", version=1))

    async def slowly(*args: object, **options: object) -> object:
        if not slow.is_set():
            slow.set()
            await updating.wait()
            await asyncio.sleep(0)  # would let the other write overtake, if it did not wait for this one
        return await call(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run.scripts, "call", slowly)
    renewal = asyncio.create_task(keeper.renew())
    await slow.wait()
    update = asyncio.create_task(keeper.update({"version": 2}))
    updating.set()
    await asyncio.gather(update, renewal)
    assert await registry.leases("rollout") == [lease("a", version=2)]


async def test_a_lease_of_a_later_release_can_be_read(run: Run) -> None:
    registry = Registry(run)
    async with await registry.register(lease("a")):
        key = run.key("lease:rollout:a")
        later = {**json.loads(await run.redis.get(key)), "api": 2, "region": "north"}
        await run.redis.set(key, json.dumps(later))
        assert [(found.id, found.api) for found in await registry.leases("rollout")] == [("a", 2)]


async def test_waiting_ends_when_enough_have_come(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, watch, watching, woken = Registry(run), run.watch, asyncio.Event(), []

    async def watched(after: str, block_ms: int) -> tuple[str, list[tuple[str, str]]]:
        watching.set()
        last, signals = await watch(after, block_ms)
        woken.extend(signals)
        return last, signals

    async def come_later() -> None:
        await watching.wait()
        await registry.register(lease("a"))

    monkeypatch.setattr(run, "watch", watched)
    task = asyncio.create_task(come_later())
    assert await registry.wait_for("rollout", 1, timeout=300) == [lease("a")]
    assert woken, "by the event, not by the heartbeat"
    await task


async def test_waiting_lists_the_live_servers(run: Run) -> None:
    registry = Registry(run)
    await registry.register(lease("only-one"))
    with pytest.raises(UnavailableError, match=r"rollout servers.*only-one at 127.0.0.1:1"):
        await registry.wait_for("rollout", 2, timeout=0.2)


async def test_waiting_ends_with_its_source_and_with_the_run(run: Run) -> None:
    registry = Registry(run)
    with pytest.raises(UnavailableError, match="has ended"):
        await registry.wait_for("rollout", 1, timeout=300, alive=lambda: False)
    await run.set_state(RunState.FAILED, "no reward server")
    with pytest.raises(RunFailedError, match="no reward server"):
        await registry.wait_for("rollout", 1, timeout=300)
