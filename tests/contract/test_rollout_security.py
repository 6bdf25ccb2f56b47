"""The token on both ports of a replica: in a whole run with simulated replicas, and for callers without it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from polyreme.config.run import RunConfig
from polyreme.config.security import SecurityConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.process.lifecycle import StopEvent
from polyreme_rollout.run_spec import RunSpec
from polyreme_rollout.serving import serve
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from polyreme_trainer.orchestrator.replicas.claim import replica_calls
from support.certificates import issue
from support.configs import run_config

TOKEN, VARIABLE = "s3cret-token", "POLYREME_TEST_TOKEN"


@asynccontextmanager
async def secured(redis_url: str, run: Run, security: SecurityConfig) -> AsyncIterator[Lease]:
    config = (await run.config()).model_copy(update={"security": security})
    spec = RunSpec(run.run_id, config, {}, "f")
    engine = SimulatedInferenceEngine(frozenset({"w"}), max_model_len=128, vocab_size=45, step_seconds=0.002)
    stop = StopEvent()
    serving = asyncio.create_task(serve(engine, spec, redis_url, Endpoint(), stop))
    try:
        [lease] = await Registry(run).wait_for("rollout", 1, 10, alive=lambda: not serving.done())
        yield lease
    finally:
        stop.set()
        await serving
        engine.close()


async def describe(address: str, security: SecurityConfig | None) -> str:
    async with rpc.connect(address, security) as channel:
        try:
            await rollout_pb2_grpc.RolloutServiceStub(channel).Describe(rollout_pb2.DescribeRequest(), timeout=300)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.parametrize("tls", [False, True])
async def test_nothing_but_probes_is_answered_without_the_token(
    redis_url: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    ours = issue(tmp_path / "ours")
    security = SecurityConfig.model_validate(ours.section(token_env=VARIABLE) if tls else {"token_env": VARIABLE})
    tokenless = SecurityConfig.model_validate(ours.section()) if tls else None
    async with secured(redis_url, run, security) as lease:
        assert await describe(lease.address, security) == "OK"
        assert await describe(lease.address, tokenless) == "UNAUTHENTICATED"
        async with rpc.connect(lease.address, tokenless) as channel:
            stub = weights_pb2_grpc.WeightsServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.Commit(weights_pb2.CommitRequest(), timeout=300)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.StageRelay(weights_pb2.StageRelayRequest(), timeout=300)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.Fetch(weights_pb2.FetchRequest(), timeout=300).read()
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                async for _ in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=300):
                    pass
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                async for _ in replica_calls(channel).begin(rollout_pb2.GenerateRequest()):
                    pass
            health = health_pb2_grpc.HealthStub(channel)
            assert (
                await health.Check(health_pb2.HealthCheckRequest(), timeout=300)
            ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        context = ssl.create_default_context(cafile=ours.ca) if tls else True
        url = f"{'https' if tls else 'http'}://{lease.http_address}"
        async with httpx.AsyncClient(verify=context, trust_env=False, base_url=url) as client:
            found = {path: (await client.get(path)).status_code for path in ("/health", "/ready", "/metrics", "/v1/models")}
            assert found == {"/health": 200, "/ready": 503, "/metrics": 401, "/v1/models": 401}
            with_token = await client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
            assert with_token.status_code == 200 and "polyreme_cpu_seconds_total" in with_token.text


def test_the_runs_security_is_the_rewards_too_unless_they_have_their_own(tmp_path: Path) -> None:
    tree = run_config(tmp_path).model_dump(mode="json")
    shared = RunConfig.model_validate({**tree, "security": {"token_env": "A"}})
    assert shared.reward.security == shared.security
    own = RunConfig.model_validate(
        {**tree, "security": {"token_env": "A"}, "reward": {**tree["reward"], "security": {"token_env": "B"}}}
    )
    assert own.reward.security is not None and own.reward.security.token_env == "B"
    assert shared.fingerprint() == RunConfig.model_validate(tree).fingerprint()


async def test_a_recorded_run_keeps_its_security(redis: Redis, run_id: str, tmp_path: Path) -> None:
    config = run_config(tmp_path).model_copy(update={"security": SecurityConfig(token_env="A")})
    run = await Run.create(redis, run_id, config, {})
    assert (await run.config()).security == config.security
