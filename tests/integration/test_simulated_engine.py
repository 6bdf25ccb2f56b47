"""`polyreme rollout` with `rollout.engine: simulated`: the configuration chooses the engine, and everything else is the real replica."""

import asyncio
import signal
from pathlib import Path

import httpx
import numpy as np

from polyreme.api.v1 import rollout_pb2
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import TensorSpec, plan_manifest
from support.replicas import Learner, generate, replica, request, rollout_config
from support.tiny_tokenizer import model_files


async def test_a_replica_serves_the_engine_of_the_configuration(redis_url: str, run_id: str, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    for name, data in model_files().items():
        (model / name).write_bytes(data)
    layout = plan_manifest([TensorSpec("weight", "F32", (4,))])
    learner = Learner(run_id, layout, Arena.create(run_id, layout.nbytes))
    config = rollout_config(model, engine="simulated")
    try:
        async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
            await learner.push(there.weights, 1, {"weight": np.arange(4, dtype="<f4")})
            described = await there.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)
            assert (described.engine, described.version) == ("simulated", 1)
            answer = (await generate(there.rollout, request(run_id, [5, 6, 7], [(0, [], 20, 0)])))[0]
            assert answer.spans == [(1, 0, 20)]
            async with httpx.AsyncClient(trust_env=False, base_url=f"http://{there.lease.http_address}", timeout=300) as client:
                body = {"model": config.name, "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
                reply = await client.post("/v1/completions", json=body)
                paths = (await client.get("/openapi.json")).json()["paths"]
            assert reply.json()["choices"][0]["text"] == " ".join(map(str, answer.ids)), reply.text
            assert (reply.headers["polyreme-policy-version"], reply.json()["system_fingerprint"]) == ("1", "policy-1")
            assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/completions"} <= set(paths)
    finally:
        learner.arena.close()


async def test_a_replica_reports_that_it_was_stopped(redis_url: str, run_id: str, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    for name, data in model_files().items():
        (model / name).write_bytes(data)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", rollout_config(model, engine="simulated")) as there:
        there.child.signal(signal.SIGTERM)
        assert await asyncio.wait_for(there.child.wait(), 300) == 0
    text = (tmp_path / "replica.log").read_text()
    assert 0 < text.index("draining: 0 running sequences") < text.index("drained, 0 sequences are left")
