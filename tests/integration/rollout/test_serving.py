"""A replica that waits for its devices, that has lost its weights, and whose engine has died."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from redis.asyncio import Redis

from polyreme.errors import PolyremeError
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.leases import Registry
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.process.lifecycle import StopEvent
from polyreme.process.supervisor import FINAL_CODES
from polyreme_rollout import serving
from polyreme_rollout.engine.protocol import Slept
from polyreme_rollout.run_spec import RunSpec
from polyreme_rollout.testing.simulated_engine import Failures, SimulatedInferenceEngine
from support.simulated import CONTEXT, ROWS, VOCAB, config_tree, idle_learner, make_run
from support.waiting import until


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


class ForgetfulEngine(SimulatedInferenceEngine):
    """Loses its weights when it sleeps."""

    async def sleep(self) -> Slept:
        await super().sleep()
        return Slept(0, weights=False, cache=False)


async def test_a_replica_whose_weights_are_lost_in_its_sleep_says_so(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    config = config_tree(tmp_path, ROWS, placement="colocated")
    run = await make_run(redis, run_id, config)
    engine = ForgetfulEngine(frozenset(["weight"]), CONTEXT, VOCAB, failures=Failures(broken_loads=frozenset({2})))
    stop, train = StopEvent(), DeviceLease(run, "train", "l", 1000.0)
    serves = asyncio.create_task(serving.serve(engine, RunSpec(run_id, config, {}, ""), redis_url, Endpoint(), stop))
    try:
        await Registry(run).wait_for("rollout", 1, 300)
        [lease] = await Registry(run).leases("rollout")
        replica: Any = SimpleNamespace(lease=lease, id=lease.id)
        async with (
            idle_learner(run, [replica]),
            rpc.connect(lease.address, None) as channel,
            httpx.AsyncClient(base_url=f"http://{lease.http_address}", trust_env=False) as http,
        ):

            async def says(version: int, ready: int, status: int) -> bool:
                metrics = (await http.get("/metrics")).text.splitlines()
                health = await HealthStub(channel).Check(HealthCheckRequest())
                told = {f"polyreme_rollout_version {version}.0", f"polyreme_rollout_ready {ready}.0"} <= set(metrics)
                return told and (await http.get("/ready")).is_success == bool(ready) and health.status == status

            await until(lambda: says(0, 1, HealthCheckResponse.SERVING))
            await train.acquire(300)
            await train.give_up()
            await until(lambda: says(-1, 0, HealthCheckResponse.NOT_SERVING))
    finally:
        stop.set()
        await asyncio.wait_for(serves, 300)
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
