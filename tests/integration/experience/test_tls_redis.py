"""A Redis with TLS and users of few rights, as a managed service has it."""

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from warnings import catch_warnings

import pytest
from redis import Redis

from polyreme.errors import StoreError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import Store, connect
from polyreme.experience.store_errors import USER_RULES, address
from polyreme.net.ports import free_port
from support.certificates import Issued, issue
from support.configs import run_config
from support.proxy import at_port, port_of
from support.tls_redis import (
    NO_TLS_REDIS,
    OPERATOR,
    PASSWORD,
    SENTINEL,
    TLS_REDIS,
    USER,
    answers,
    operator,
    settings,
    started,
    tls_redis,
)
from support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(TLS_REDIS is None, reason=NO_TLS_REDIS),
    # A TLS connection that fails closes in the background, and the end of its event loop may come first: in the same test, or in a later one.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def url(issued: Issued, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a run's user, without its password."""
    with tls_redis(tmp_path_factory.mktemp("redis"), issued) as port:
        yield f"rediss://{USER}@127.0.0.1:{port}/0?ssl_ca_certs={issued.ca}"


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", PASSWORD)


@pytest.fixture
def admin(url: str, issued: Issued) -> Iterator[Redis]:
    with operator(issued, "127.0.0.1", port_of(url)) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[Store]:
    async with await connect(url, 1.0) as client:
        yield client


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Those of the last test do not reach the next file."""
    yield
    with catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


async def refusal(url: str) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await connect(url, 1.0)
    assert PASSWORD not in str(caught.value)
    return caught.value


async def test_a_run_works_with_tls_and_the_least_rights(client: Store, run_id: str, tmp_path: Path) -> None:
    run = await Run.create(client, run_id, run_config(tmp_path), {"config.json": b"{}"})
    orchestrator, learner = ExperienceLog(run), ExperienceLog(run)
    await orchestrator.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    for admission in await orchestrator.admit(4):
        await orchestrator.append(admission.index, admission.attempt, b"payload", 0, 0.0)
    assert await learner.plan(1, 60) is not None
    assert (await learner.audit()).clean


@pytest.mark.parametrize("command", ["KEYS *", "FLUSHALL", "CONFIG SET appendfsync no", "ACL LIST", "SET other 1"])
async def test_the_rights_end_at_the_keys_of_runs(client: Store, command: str) -> None:
    with pytest.raises(StoreError, match="found NOPERM"):
        await client.execute_command(*command.split())


async def test_a_ca_that_has_not_signed(url: str, issued: Issued, tmp_path: Path) -> None:
    error = await refusal(url.replace(str(issued.ca), str(issue(tmp_path / "other").ca)))
    assert "certificate" in error.expected and "ssl_ca_certs=" in error.do
    assert "ssl_ca_certs" in (await refusal(url.partition("?")[0])).do  # the system's CAs


async def test_a_certificate_of_another_host(url: str) -> None:
    error = await refusal(url.replace("127.0.0.1", "localhost"))
    assert "mismatch" in error.found and "as it stands in the certificate" in error.do


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_ca_file_that_is_none(url: str, issued: Issued, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content:
        path.write_text(content)
    error = await refusal(url.replace(str(issued.ca), str(path)))
    assert "ssl_ca_certs" in error.expected and error.found.startswith(str(path))


async def test_a_server_that_asks_for_a_certificate(url: str, issued: Issued, admin: Redis) -> None:
    admin.config_set("tls-auth-clients", "yes")  # for new connections
    try:
        async with await connect(f"{url}&ssl_certfile={issued.certificate}&ssl_keyfile={issued.key}", 1.0) as client:
            assert await client.ping()
        await refusal(url)
    finally:
        admin.config_set("tls-auth-clients", "no")


async def test_a_wrong_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", "wrong")
    assert "Set POLYREME_REDIS_PASSWORD" in (await refusal(url)).do


async def test_tls_on_one_side_only(url: str, own_server: EmbeddedServer) -> None:
    for wrong in (at_port(url, port_of(own_server.url)), f"redis://127.0.0.1:{port_of(url)}/0"):
        assert "rediss:// with TLS, redis:// without" in (await refusal(wrong)).do


@pytest.mark.parametrize("lacks", ["-hset", "-wait", "-xread", "-config|get"])
async def test_a_user_that_lacks_a_right(lacks: str, url: str, admin: Redis, run_id: str, tmp_path: Path) -> None:
    admin.execute_command("ACL", "SETUSER", "guest", "reset", "on", f">{PASSWORD}", *USER_RULES.split(), lacks)
    with pytest.raises(StoreError, match=r"ACL SETUSER <user> ~polyreme:\*"):
        async with await connect(url.replace(f"//{USER}@", "//guest@"), 1.0) as guest:
            guest.replicas = int(lacks == "-wait")
            run = await Run.create(guest, run_id, run_config(tmp_path), {})
            await run.records("0", 0)


@pytest.fixture(scope="module")
def sentinel(url: str, issued: Issued, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same server behind a Sentinel with a password of its own."""
    folder, port = tmp_path_factory.mktemp("sentinel"), free_port()
    config = (
        f"{settings(issued, '127.0.0.1', port)}requirepass {SENTINEL}\nsentinel monitor polyreme 127.0.0.1 {port_of(url)} 1\n"
    )
    process = started(folder, "sentinel", f"{config}sentinel auth-pass polyreme {OPERATOR}\n", "--sentinel")
    try:
        with operator(issued, "127.0.0.1", port, SENTINEL) as client:
            wait_until(lambda: process.poll() is not None or answers(client))
        yield f"{at_port(url, port)}&sentinel=polyreme"
    finally:
        process.kill()
        process.wait()


async def test_the_primary_that_a_sentinel_names(sentinel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYREME_SENTINEL_PASSWORD", SENTINEL)
    for url in (sentinel, at_port(sentinel, free_port()) + f"&sentinels=127.0.0.1:{port_of(sentinel)}"):
        async with await connect(url, 1.0) as client:
            assert await client.ping() and address(client) == "the primary polyreme of its Sentinels"


@pytest.mark.parametrize(("name", "password"), [("other", SENTINEL), ("polyreme", "wrong"), ("polyreme", "")])
async def test_a_sentinel_that_names_none(name: str, password: str, sentinel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYREME_SENTINEL_PASSWORD", password)
    error = await refusal(sentinel.replace("sentinel=polyreme", f"sentinel={name}"))
    assert f"the primary {name} of its Sentinels" in error.expected and "POLYREME_SENTINEL_PASSWORD" in error.do
    assert ("AuthenticationError" in error.found) == (password != SENTINEL)
