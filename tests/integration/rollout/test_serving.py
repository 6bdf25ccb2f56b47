"""A replica whose engine has died exits with a restartable code."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.errors import PolyremeError
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.leases import Registry
from polyreme.net.endpoint import Endpoint
from polyreme.process.lifecycle import StopEvent
from polyreme.process.supervisor import FINAL_CODES
from polyreme_rollout import serving
from polyreme_rollout.run_spec import RunSpec
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from support.simulated import CONTEXT, ROWS, VOCAB, config_tree, make_run


async def test_a_colocated_replica_that_waits_for_the_devices_heeds_a_stop(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    config = config_tree(tmp_path, ROWS, placement="colocated")
    run = await make_run(redis, run_id, config)
    await DeviceLease(run, "train", "l", 1000.0).acquire()
    engine, stop = SimulatedInferenceEngine(frozenset(["weight"]), CONTEXT, VOCAB), StopEvent()
    serves = asyncio.create_task(
        serving.serve(engine, RunSpec(run_id, config, {}, ""), redis_url, Endpoint(http_port=None), stop)
    )
    stop.set()
    await asyncio.wait_for(serves, 300)
    assert await Registry(run).leases("rollout") == []
    engine.close()


async def test_a_dead_engine_ends_the_replica_with_a_restartable_code(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    config = config_tree(tmp_path, ROWS)
    registry = Registry(await make_run(redis, run_id, config))
    engine = SimulatedInferenceEngine(frozenset(["weight"]), CONTEXT, VOCAB)
    spec = RunSpec(run_id, config, {}, "")
    serves = asyncio.create_task(serving.serve(engine, spec, redis_url, Endpoint(http_port=None), StopEvent()))
    await registry.wait_for("rollout", 1, 300)
    engine.close()
    with pytest.raises(PolyremeError, match="the engine to run") as raised:
        await asyncio.wait_for(serves, 300)
    assert raised.value.exit_code not in FINAL_CODES
    assert await registry.leases("rollout") == []
