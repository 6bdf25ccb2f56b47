"""TLS, mutual TLS and the bearer token, on both ports of the reward service and in the trainer's own client."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.config.load import load_reward_config
from polyreme.config.reward import RewardConfig
from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_reward.server import Addresses, serve
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question
from support.certificates import Issued, issue, pem_key
from support.configs import run_config
from support.rewards import EXACT, reward_config, spelled

TOKEN = "s3cret-token"
VARIABLE = "POLYREME_TEST_TOKEN"
BODY = {"items": [{"response": "#3", "label": "3"}]}
REQUEST = reward_pb2.ScoreRequest(run_id="r", items=[reward_pb2.ScoreItem(response="#3", label="3")])


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issued:
    monkeypatch.setenv(VARIABLE, TOKEN)
    return issue(tmp_path / "ours")


@asynccontextmanager
async def secured(section: dict[str, object]) -> AsyncIterator[tuple[Addresses, SecurityConfig]]:
    config = reward_config(EXACT, security=section)
    assert config.security is not None
    async with serve(config) as addresses:
        yield addresses, config.security


async def grpc_score(address: str, security: SecurityConfig | None) -> float | str:
    """The score of a right answer, or the name of the status."""
    async with rpc.connect(address, security) as channel:
        try:
            reply = await reward_pb2_grpc.RewardServiceStub(channel).Score(REQUEST, timeout=300)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return reply.results[0].score


async def http_score(url: str, context: ssl.SSLContext | bool, authorization: str | None) -> float | int | str:
    """The score of a right answer, the HTTP status of a refusal, or "unreachable"."""
    headers = {} if authorization is None else {"authorization": authorization}
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=300, headers=headers) as client:
        try:
            reply = await client.post(f"{url}v1/score", json=BODY)
        except httpx.TransportError:
            return "unreachable"
        return reply.json()["results"][0]["score"] if reply.status_code == 200 else reply.status_code


def client_context(trusted: Issued, shown: Issued | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted.ca)
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


async def test_tls_is_required_and_the_server_name_is_checked(ours: Issued, tmp_path: Path) -> None:
    stranger = issue(tmp_path / "stranger")
    async with secured(ours.section()) as (addresses, security):
        assert addresses.url.startswith("https://127.0.0.1:")
        assert await grpc_score(addresses.grpc, security) == 1.0
        assert await http_score(addresses.url, client_context(ours), None) == 1.0
        distrust = SecurityConfig.model_validate(ours.section(ca=str(stranger.ca)))
        assert await grpc_score(addresses.grpc, distrust) == "UNAVAILABLE"
        assert await http_score(addresses.url, client_context(stranger), None) == "unreachable"
        assert await grpc_score(addresses.grpc, None) == "UNAVAILABLE"
        assert await http_score(addresses.url.replace("https", "http"), True, None) == "unreachable"


async def test_mutual_tls_lets_in_only_whom_the_ca_knows(ours: Issued, tmp_path: Path) -> None:
    stranger = issue(tmp_path / "stranger")
    async with secured(ours.section(mutual=True)) as (addresses, security):
        assert await grpc_score(addresses.grpc, security) == 1.0
        assert await http_score(addresses.url, client_context(ours, ours), None) == 1.0
        nobody = SecurityConfig.model_validate(ours.section())
        assert await grpc_score(addresses.grpc, nobody) == "UNAVAILABLE"
        assert await http_score(addresses.url, client_context(ours), None) == "unreachable"
        impostor = SecurityConfig.model_validate(stranger.section(ca=str(ours.ca), mutual=True))
        assert await grpc_score(addresses.grpc, impostor) == "UNAVAILABLE"
        assert await http_score(addresses.url, client_context(ours, stranger), None) == "unreachable"
        assert await grpc_score(addresses.grpc, security) == 1.0


async def test_nothing_but_health_is_answered_without_the_token(ours: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    async with secured(ours.section(token_env=VARIABLE)) as (addresses, security):
        assert await grpc_score(addresses.grpc, security) == 1.0
        assert await http_score(addresses.url, client_context(ours), f"Bearer {TOKEN}") == 1.0
        for header in (None, TOKEN, "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xff"):
            sent = header.encode("latin-1") if header else None
            assert await http_score(addresses.url, client_context(ours), sent) == 401, header  # type: ignore[arg-type]
        plain = SecurityConfig.model_validate(ours.section())
        assert await grpc_score(addresses.grpc, plain) == "UNAUTHENTICATED"
        monkeypatch.setenv(VARIABLE, "another")
        assert await grpc_score(addresses.grpc, security) == "UNAUTHENTICATED"
        async with rpc.connect(addresses.grpc, plain) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=300)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        async with httpx.AsyncClient(verify=client_context(ours), trust_env=False, base_url=addresses.url) as client:
            found = {path: (await client.get(path)).status_code for path in ("health", "ready", "metrics", "docs", "v1/rewards")}
            assert found == {"health": 200, "ready": 200, "metrics": 401, "docs": 401, "v1/rewards": 401}
            refused = await client.get("v1/rewards")
            assert refused.headers["www-authenticate"] == "Bearer" and TOKEN not in refused.text


async def test_a_token_alone_on_a_network_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    async with secured({"token_env": VARIABLE}) as (addresses, security):
        assert addresses.url.startswith("http://127.0.0.1:")
        assert await grpc_score(addresses.grpc, security) == 1.0
        assert await grpc_score(addresses.grpc, None) == "UNAUTHENTICATED"
        assert await http_score(addresses.url, True, f"Bearer {TOKEN}") == 1.0
        assert await http_score(addresses.url, True, None) == 401
        monkeypatch.setenv(VARIABLE, "another")
        assert await grpc_score(addresses.grpc, security) == "UNAUTHENTICATED"


async def test_one_name_for_servers_at_any_address(tmp_path: Path) -> None:
    ours = issue(tmp_path / "named", "polyreme")
    async with secured(ours.section(server_name="polyreme", mutual=True)) as (addresses, security):
        assert await grpc_score(addresses.grpc, security) == 1.0
        assert await grpc_score(addresses.grpc, security.model_copy(update={"server_name": None})) == "UNAVAILABLE"


async def test_a_run_scores_through_a_secured_service(redis: Redis, run_id: str, tmp_path: Path, ours: Issued) -> None:
    config = reward_config(EXACT, security=ours.section(mutual=True, token_env=VARIABLE))
    run = await Run.create(redis, run_id, run_config(tmp_path, reward=config), {"config.json": b"{}", "tokenizer.json": b"{}"})
    recorded = (await run.config()).reward
    assert recorded.security == config.security and TOKEN not in recorded.model_dump_json()
    async with serve(recorded, run=run):
        rewards = RewardClient(run, recorded, spelled)
        try:
            await rewards.wait_for(1)
            await rewards.refresh()
            (result,) = await rewards.score([Question(("q",), "p", "#3", "", "3", "")])
            assert result.score == 1.0
        finally:
            await rewards.close()


def _encrypted(ours: Issued) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    ours.key.write_bytes(pem_key(key, serialization.BestAvailableEncryption(b"password")))


@pytest.mark.parametrize(
    ("spoil", "fields", "said"),
    [
        (lambda ours: ours.key.unlink(), {}, "found no file .*key.pem"),
        (lambda ours: ours.certificate.write_text("no PEM"), {}, "certificate.pem.*PEM lib"),
        (lambda ours: ours.key.write_bytes(issue(ours.key.parent / "other").key.read_bytes()), {}, "(?i)values.mismatch"),
        (_encrypted, {}, "an encrypted one"),
        (lambda ours: ours.ca.write_text(""), {"mutual": True}, "(?i)found .*no.certificate.or.crl"),
        (lambda ours: None, {"token_env": "POLYREME_TEST_UNSET"}, "POLYREME_TEST_UNSET; found none"),
    ],
    ids=["no key", "no certificate", "another's key", "encrypted", "no ca", "no token"],
)
async def test_what_cannot_be_used_is_one_error_at_start(ours: Issued, spoil, fields: dict[str, object], said: str) -> None:
    spoil(ours)
    with pytest.raises(ConfigError, match=said):
        async with secured(ours.section(**fields)):
            pass


def test_the_section_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rewards.yaml"
    path.write_text(
        "reward: {rewards: [{name: exact}], security: {certificate: a.pem, key: ~/b.pem, ca: c/d.pem, mutual: true, token_env: T}}"
    )
    found = load_reward_config(path).security
    assert found is not None
    assert (found.certificate, found.ca, found.key) == (
        tmp_path / "a.pem",
        tmp_path / "c" / "d.pem",
        Path("~/b.pem").expanduser(),
    )
    with pytest.raises(ValueError, match="`certificate` and `key`, or `token_env`"):
        RewardConfig.model_validate({"rewards": [EXACT], "security": {"ca": "c"}})
    with pytest.raises(ValueError, match="`mutual` needs `ca`"):
        RewardConfig.model_validate({"rewards": [EXACT], "security": {"certificate": "a", "key": "b", "mutual": True}})
