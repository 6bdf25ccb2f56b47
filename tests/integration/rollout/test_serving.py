"""A replica whose engine is gone: it leaves, and says so in a way that has it started again."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.errors import PolyremeError
from polyreme.experience.leases import Registry
from polyreme.net.endpoint import Place
from polyreme.process.supervisor import FINAL_CODES
from polyreme_rollout import serving
from polyreme_rollout.replica import Orders
from polyreme_rollout.testing.simulated_engine import SimulatedEngine
from support.simulated import CONTEXT, ROWS, VOCAB, config_tree, make_run


async def test_a_dead_engine_is_what_a_new_start_mends(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WATCH_SECONDS", 0.02)
    config = config_tree(tmp_path, ROWS)
    registry = Registry(await make_run(redis, run_id, config))
    engine = SimulatedEngine(frozenset(["weight"]), CONTEXT, VOCAB)
    orders = Orders(run_id, config, {}, "")
    serves = asyncio.create_task(serving.serve(engine, orders, redis_url, Place(http_port=None), asyncio.Event()))
    await registry.wait_for("rollout", 1, 300)
    engine.close()
    with pytest.raises(PolyremeError, match="the engine to run") as told:
        await asyncio.wait_for(serves, 300)
    assert told.value.exit_code not in FINAL_CODES
    assert await registry.leases("rollout") == []
