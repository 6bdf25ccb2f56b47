"""The run's token and TLS at a gateway, which requires them from clients and presents them to the replicas."""

import ssl
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.config.security import SecurityConfig
from polyreme.experience.run import Run
from support.certificates import issue
from support.configs import run_config
from support.gateways import gateway, reply_with, scripted_replica

TOKEN, VARIABLE = "s3cret-token", "POLYREME_TEST_TOKEN"


@pytest.mark.parametrize("mutual", [None, False, True], ids=["token", "TLS", "mutual TLS"])
async def test_callers_and_the_gateway_itself_need_what_the_run_asks_for(
    redis: Redis, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutual: bool | None
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    ours = issue(tmp_path / "ours", "replicas.example")  # a name other than the servers' address
    section = {"token_env": VARIABLE}
    if mutual is not None:
        section = ours.section(token_env=VARIABLE, server_name="replicas.example", mutual=mutual)  # type: ignore[assignment]
    security = SecurityConfig.model_validate(section)
    run = await Run.create(redis, run_id, run_config(tmp_path).model_copy(update={"security": security}), {})
    context = ssl.create_default_context(cafile=ours.ca)
    context.check_hostname = False
    if mutual:
        context.load_cert_chain(ours.certificate, ours.key)
    url = "http" if mutual is None else "https"
    async with (
        scripted_replica(run, "a", reply_with(b"{}"), version=3, security=security) as replica,
        gateway(run, url=url, verify=context) as http,
    ):
        found = {path: (await http.get(path)).status_code for path in ("/health", "/ready", "/metrics", "/v1/models")}
        assert found == {"/health": 200, "/ready": 200, "/metrics": 401, "/v1/models": 401}
        refused = await http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert replica.bodies == []
        for headers, status in (
            ({"x-api-key": TOKEN}, 200),
            ({"x-api-key": f"{TOKEN}x"}, 401),
            ({"x-api-key": f"Bearer {TOKEN}"}, 401),
        ):
            assert (await http.get("/v1/models", headers=headers)).status_code == status
        http.headers["authorization"] = f"Bearer {TOKEN}"
        assert (await http.get("/v1/models", headers={"x-api-key": "of another service"})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert len(replica.bodies) == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [({"host": "page.example"}, 421, "unknown_host"), ({"origin": "http://page.example"}, 403, "foreign_page")],
)
async def test_a_web_page_of_others_is_refused_in_the_format(run: Run, headers: dict[str, str], status: int, code: str) -> None:
    async with gateway(run) as http:
        refused = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
