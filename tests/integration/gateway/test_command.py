"""`polyreme gateway` with simulated replicas. The command, the services and Redis are real."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from redis.asyncio import Redis

from polyreme.experience.leases import Registry
from polyreme.experience.run import RunState
from polyreme.net.endpoint import Endpoint
from polyreme.process.lifecycle import Child, StopEvent
from polyreme_rollout.run_spec import RunSpec
from polyreme_rollout.serving import serve
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from support.simulated import CONTEXT, ROWS, VOCAB, config_tree, idle_learner, make_run
from support.waiting import until

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "logprobs": 1}


async def test_the_command_answers_as_a_replica_does_until_its_run_is_over(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS))
    engine, stop = SimulatedInferenceEngine(frozenset(["weight"]), CONTEXT, VOCAB), StopEvent()
    serving = asyncio.create_task(serve(engine, RunSpec(run_id, await run.config(), {}, ""), redis_url, Endpoint(), stop))
    command = [sys.executable, "-m", "polyreme", "gateway", "--redis", redis_url, "--port", "0", "--alias", "policy"]
    child = Child.spawn("gateway", command, log_path=tmp_path / "gateway.log")
    try:
        [lease] = await Registry(run).wait_for("rollout", 1, 300, alive=lambda: not serving.done())
        await until(lambda: "ready: run" in child.log_tail() or child.poll() is not None)
        match = re.search(rf"ready: run {run_id} at (http://127\.0\.0\.1:\d+)/v1", child.log_tail(50))
        assert match, child.log_tail(50)
        async with (
            idle_learner(run, [cast(Any, SimpleNamespace(id=lease.id, lease=lease))], version=7),
            httpx.AsyncClient(trust_env=False, timeout=300, verify=False) as http,
        ):
            direct, through = f"http://{lease.http_address}", match[1]

            async def is_ready() -> bool:
                return (await http.get(f"{through}/ready")).status_code == 200

            await until(is_ready)
            for body in (PROMPT, {**PROMPT, "stream": True}):
                replies = [await http.post(f"{url}/v1/completions", json=body) for url in (direct, through)]
                first, second = [re.sub(rb'"id": ?"[^"]*", ?"created": ?\d+', b"", reply.content) for reply in replies]
                assert first == second
                assert replies[1].headers["polyreme-replica"] == lease.id
                assert replies[1].headers["polyreme-policy-version"] == "7"
            assert replies[1].content.endswith(b"data: [DONE]\n\n")
        await run.set_state(RunState.FAILED, "the test ends it")
        assert await asyncio.wait_for(child.wait(), 300) == 0
    finally:
        await child.stop(300)
        stop.set()
        await serving
        engine.close()
