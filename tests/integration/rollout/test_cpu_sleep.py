"""A colocated replica whose engine ends while the learner trains (`rollout.cpu_sleep: end`)."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from polyreme.api.v1.rollout_pb2_grpc import RolloutServiceStub
from polyreme.api.v1.weights_pb2_grpc import WeightsServiceStub
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.leases import Registry
from polyreme.experience.run import RunState
from polyreme.net import rpc
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import TensorSpec, plan_manifest
from support.models import tiny_model
from support.replicas import Learner, generate, hf_weights, replica, request, rollout_config
from support.tiny_tokenizer import model_files
from support.waiting import until

RESTING_BYTES = 200 << 20  # a process that has imported neither torch nor vLLM
ENGINE_BYTES = {"simulated": -1, "vllm": 200 << 20}  # less than the engine's processes have; a simulated one has none
LONGEST = {"simulated": 10**7, "vllm": 4096}


@pytest.mark.parametrize("engine", ["simulated", pytest.param("vllm", marks=[pytest.mark.real, pytest.mark.slow])])
async def test_an_engine_ends_for_the_learner_and_starts_again_in_the_same_process(
    engine: str, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if engine == "vllm":
        weights = hf_weights(tiny_model("tied", model, hidden_size=128, context=LONGEST[engine]))
        learner = Learner.of(run_id, model)
    else:
        model.mkdir()
        for name, data in model_files().items():
            (model / name).write_bytes(data)
        weights, layout = {"weight": np.arange(4, dtype="<f4")}, plan_manifest([TensorSpec("weight", "F32", (4,))])
        learner = Learner(run_id, layout, Arena.create(run_id, layout.nbytes))
    config = rollout_config(model, engine=engine, cpu_sleep="end", max_model_len=LONGEST[engine])
    config = config.model_copy(update={"placement": "colocated"})
    try:
        async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
            process, registry = psutil.Process(there.child.pid), Registry(there.run)
            device = DeviceLease(there.run, "train", "learner")
            await learner.push(there.weights, 1, weights)
            running = there.rollout.Generate(request(run_id, [5, 6, 7], [(0, [], LONGEST[engine] // 2, 0)]), timeout=300)
            await running.read()
            await device.acquire(300)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await running.read() is not grpc.aio.EOF:
                    pass
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await registry.leases("rollout") == []
            assert process.children() == []
            await until(lambda: process.memory_info().rss < RESTING_BYTES)
            await device.give_up()
            [lease] = await registry.wait_for("rollout", 1, 300, alive=lambda: there.child.poll() is None)
            assert lease.id != there.lease.id
            ends = [record for _, record in await there.run.records("0", 0) if record["kind"] == "engine_end"]
            assert [record["pid"] for record in ends] == [process.pid]
            assert ends[0]["freed_bytes"] > ENGINE_BYTES[engine]
            async with rpc.connect(lease.address) as channel:
                await learner.push(WeightsServiceStub(channel), 2, weights)
                answer = (await generate(RolloutServiceStub(channel), request(run_id, [5, 6, 7], [(0, [], 20, 0)])))[0]
            assert answer.spans == [(2, 0, 20)]
            await device.acquire(300)
            await there.run.set_state(RunState.DONE)
            assert await asyncio.wait_for(there.child.wait(), 300) == 0
    finally:
        learner.arena.close()
