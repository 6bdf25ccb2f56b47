"""Accounts and quotas: who may use the service, how much, and what an answer says when it is too much."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from polyreme.config.serve import ServeConfig, ServeQuota
from polyreme.errors import ConfigError
from polyreme.experience.requests import RequestLog, place_of
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.http_answers import tenant_with
from support.simulated_service import BASE, api, simulated_service

ALICE, BOB = "tml-alice", "tml-bob"
ACCOUNTS = Accounts(
    {tenant_with(ALICE): "alice", tenant_with(BOB): "bob"},
    {tenant_with(ALICE): ServeQuota(models=2, sessions=2, requests=4), tenant_with(BOB): ServeQuota()},
)


class Client:
    """The API's application, asked by tenants."""

    def __init__(self, http: httpx.AsyncClient, log: RequestLog) -> None:
        self.http, self.log = http, log

    async def post(self, key: str, path: str, status: int = 200, **fields: Any) -> Any:
        answer = await self.http.post(f"/api/v1/{path}", json=fields, headers={"x-api-key": key})
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self, key: str, status: int = 200) -> Any:
        return await self.post(key, "create_session", status, tags=[], sdk_version="0.38.0")

    async def model(self, key: str, session: str, number: int, status: int = 200) -> Any:
        given = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 4}}
        return await self.post(key, "create_model", status, **given)


@pytest.fixture
async def client(redis: Redis, run_id: str, tmp_path: Path) -> AsyncIterator[Client]:
    log = RequestLog(redis, run_id)
    app = api(log, tmp_path, ACCOUNTS).app()
    async with log.following(), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        yield Client(http, log)


async def test_only_accounts_are_served(client: Client) -> None:
    for key in ("tml-other", ""):
        assert (await client.session(key, 401))["category"] == "user"
    assert (await client.http.get("/api/v1/healthz")).status_code == 200
    name = (await client.session(ALICE))["session_id"]
    assert name.startswith(tenant_with(ALICE))
    assert "expected a session" in (await client.post(BOB, "session_heartbeat", 404, session_id=name))["error"]


async def test_a_tenant_has_so_many_sessions_and_models(client: Client) -> None:
    first, _ = [(await client.session(ALICE))["session_id"] for _ in range(2)]
    assert "at most 2 sessions" in (await client.session(ALICE, 400))["error"]
    models = [(await client.model(ALICE, first, number))["model_id"] for number in range(2)]
    assert "at most 2 models" in (await client.model(ALICE, first, 2, 400))["error"]
    await client.model(ALICE, first, 1)  # a repetition
    await client.post(ALICE, "unload_model", model_id=models[0])
    await client.model(ALICE, first, 2)
    await client.session(BOB)


async def test_sessions_that_have_ended_are_bounded(client: Client, redis: Redis, run_id: str) -> None:
    client.log.limits.ended_records = 3
    goes_on, *ended = [(await client.session(ALICE))["session_id"]]
    for _ in range(10):
        ended.append((await client.session(ALICE))["session_id"])
        done = await client.http.post(f"/api/v1/sessions/{ended[-1]}/finish", json={}, headers={"x-api-key": ALICE})
        assert done.status_code == 204, done.text
    await client.session(ALICE)
    kept = [each async for each in redis.scan_iter(f"*{run_id}*:session:{tenant_with(ALICE)}?*")]
    assert len(kept) == 2 + 3
    found = [await client.http.get(f"/api/v1/sessions/{each}", headers={"x-api-key": ALICE}) for each in (goes_on, *ended)]
    assert [each.status_code for each in found] == [200] + [404] * 7 + [200] * 3


async def test_requests_at_the_same_time_stay_within_a_quota(client: Client) -> None:
    session = (await client.session(ALICE))["session_id"]
    given = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 4}}
    asked: list[tuple[str, dict[str, Any]]] = [("create_session", {"tags": []})] * 8
    asked += [("create_model", {**given, "model_seq_id": number}) for number in range(8)]
    posts = [client.http.post(f"/api/v1/{path}", json=fields, headers={"x-api-key": ALICE}) for path, fields in asked]
    statuses = [answer.status_code for answer in await asyncio.gather(*posts)]
    assert (statuses[:8].count(200), statuses[8:].count(200)) == (1, 2)


async def test_a_model_that_could_not_be_created_is_not_counted(redis: Redis, run_id: str, tmp_path: Path) -> None:
    """What follows it is answered, too, and a repetition has its answer."""
    log = RequestLog(redis, run_id)
    serving = simulated_service(redis, run_id, tmp_path, 0, ACCOUNTS)
    async with serving as address, log.following(), httpx.AsyncClient(base_url=address) as http:
        client = Client(http, log)
        session = (await client.session(ALICE))["session_id"]
        for number in (0, 1, 2, 2):
            model = await client.model(ALICE, session, number)
            failed = await log.result(model["request_id"], 60.0)
            assert failed is not None and b"GiB of models on disk" in failed
        step = await client.post(ALICE, "optim_step", model_id=model["model_id"], seq_id=1)
        failed = await log.result(step["request_id"], 60.0)
        assert failed is not None and b"could not be created" in failed
    assert [await redis.ttl(key) > 0 async for key in redis.scan_iter(f"*lane:{session}:*")] == [True] * 3


async def test_a_tenant_has_so_many_requests_that_wait(client: Client) -> None:
    session = (await client.session(ALICE))["session_id"]
    model = (await client.model(ALICE, session, 0))["model_id"]
    for seq in (1, 2, 3):
        await client.post(ALICE, "optim_step", model_id=model, seq_id=seq)
    refused = await client.post(ALICE, "optim_step", 429, model_id=model, seq_id=4)
    assert "at most 4 waiting requests of a tenant" in refused["error"]
    bobs = (await client.session(BOB))["session_id"]
    await client.model(BOB, bobs, 0)
    await client.log.finish(place_of(f"{model}:0", "learner"), b"J{}")
    await client.post(ALICE, "optim_step", model_id=model, seq_id=4)


def config(**tenant: Any) -> ServeConfig:
    tree = {"model": {"path": "model"}, "sampler": {"max_model_len": 8}, "tenants": [{"name": "alice", **tenant}]}
    return ServeConfig.model_validate(tree)


def test_keys_are_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(token_env="ALICE_KEY", quota={"models": 3})
    with pytest.raises(ConfigError, match="found none"):
        Accounts.read(given)
    monkeypatch.setenv("ALICE_KEY", "secret")
    with pytest.raises(ConfigError, match="does not begin with tml-"):
        Accounts.read(given)
    monkeypatch.setenv("ALICE_KEY", ALICE)
    accounts = Accounts.read(given)
    assert accounts.names == {tenant_with(ALICE): "alice"}
    assert (accounts.quota_of(tenant_with(ALICE)).models, accounts.quota_of("other").models) == (3, 16)
    assert accounts.admits(tenant_with(ALICE)) and not accounts.admits("other") and Accounts().admits("other")
