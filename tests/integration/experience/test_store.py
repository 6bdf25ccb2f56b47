"""A client of a run's Redis: refusals, retries and error reports."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio.connection import AbstractConnection

from polyreme.errors import StoreError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.metric_records import DoneLearning
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from support.configs import run_config
from support.proxy import at_port, bad_network, port_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_nothing_listens_at_the_address() -> None:
    port = free_port()
    with pytest.raises(StoreError) as caught:
        await connect(f"redis://user:secret@127.0.0.1:{port}/0", 0.3)
    text = str(caught.value)
    assert f"expected a Redis that answers at 127.0.0.1:{port}; found" in text
    assert "refused" in text and "redis-server --appendonly yes --appendfsync always" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "url", ["127.0.0.1:6379", "http://127.0.0.1", "redis://127.0.0.1:many", "redis://127.0.0.1/0?socket_timeout=secret"]
)
async def test_invalid_redis_urls(url: str) -> None:
    with pytest.raises(StoreError, match=r"expected a Redis URL such as redis://127\.0\.0\.1:6379/0") as caught:
        await connect(url)
    assert "secret" not in str(caught.value)


async def test_another_server_at_the_address() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(StoreError, match="a server that speaks another protocol"):
            await connect(f"redis://127.0.0.1:{port}")
    finally:
        server.close()
        await server.wait_closed()


def as_user(url: str, login: str) -> str:
    """The URL with another `user:password`, or without any."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{login}{'@' * bool(login)}{parts.hostname}:{parts.port}").geturl()


async def test_settings_that_could_lose_experience(own_server: EmbeddedServer) -> None:
    client = await connect(own_server.url)
    await client.config_set("appendfsync", "everysec")
    await client.config_set("maxmemory-policy", "allkeys-lru")
    await client.aclose()
    with pytest.raises(StoreError) as caught:
        await connect(own_server.url)
    text = str(caught.value)
    assert "appendfsync everysec (must be always), maxmemory-policy allkeys-lru (must be noeviction)" in text
    assert "`config set appendfsync always`; `config set maxmemory-policy noeviction`" in text
    assert "appendonly" in text  # the complete command that starts a suitable server


async def test_a_password_that_is_wrong_or_missing(own_server: EmbeddedServer) -> None:
    client = await connect(own_server.url)
    await client.config_set("requirepass", "open sesame")
    await client.aclose()
    for url in (own_server.url, as_user(own_server.url, ":wrong"), as_user(own_server.url, "")):
        with pytest.raises(StoreError, match="Set POLYREME_REDIS_PASSWORD"):
            await connect(url)


async def test_a_user_without_permissions(own_server: EmbeddedServer) -> None:
    client = await connect(own_server.url)
    await client.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~*", "+@all", "-config")
    await client.aclose()
    with pytest.raises(StoreError, match=r"'config\|get'.*ACL SETUSER"):
        await connect(as_user(own_server.url, "guest:pw"))


async def test_a_client_rides_over_a_restart(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as first:
        client = await connect(first.url)
        run = await Run.create(client, "riding", run_config(tmp_path), {})
        log = ExperienceLog(run)
        await log.take(Writer.LEARNER)
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        beginning = asyncio.create_task(log.begin(0))
        await asyncio.sleep(0.3)
        assert not beginning.done()
        with EmbeddedServer.start(tmp_path / "redis", port=port_of(first.url)):
            await beginning  # the scripts, which the restarted server has lost, are loaded again
            assert await log.version() == 0
            await client.aclose()


async def test_a_lost_redis_is_logged_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreError):
        await connect(f"redis://127.0.0.1:{free_port()}", 0.5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as server:
        client = await connect(server.url)
        client.reconnect_timeout = 0.3
        server.stop()
        with pytest.raises(StoreError, match="expected a Redis that answers"):
            await client.get("x")
        await client.aclose()


async def test_a_server_that_stands_still(own_server: EmbeddedServer) -> None:
    client = await connect(own_server.url, socket_timeout=0.2)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        setting = asyncio.create_task(client.set("x", "1"))
        await asyncio.sleep(0.5)
        assert not setting.done()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    await setting
    await client.aclose()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_command_that_ends_as_it_is_cancelled_is_cancelled(
    fails: bool, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(own_server.url)
    send = AbstractConnection._send_packed_command

    async def sends_as_it_is_cancelled(connection: AbstractConnection, command: Iterable[bytes]) -> None:
        getting.cancel()
        if fails:
            raise ConnectionResetError("Connection lost")
        await send(connection, command)

    getting = asyncio.create_task(client.get("x"))
    monkeypatch.setattr(AbstractConnection, "_send_packed_command", sends_as_it_is_cancelled)
    async with asyncio.timeout(300):
        await asyncio.wait({getting})
    assert getting.cancelled()
    monkeypatch.undo()
    assert await client.get("x") is None
    await client.aclose()


async def test_the_groups_without_a_plan_are_read_over_a_restart(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as first:
        client = await connect(first.url)
        log = ExperienceLog(await Run.create(client, "riding", run_config(tmp_path), {}))
        await log.take(Writer.LEARNER)
        await log.begin(0)
        found = await log.unplanned()
        first.stop()
        reading = asyncio.create_task(log.unplanned())
        await asyncio.sleep(0.3)
        assert not reading.done()
        with EmbeddedServer.start(tmp_path / "redis", port=port_of(first.url)):
            assert await reading == found
            await client.aclose()


async def test_an_append_whose_answer_was_lost_is_one_append(redis_url: str, tmp_path: Path) -> None:
    async with bad_network("127.0.0.1", port_of(redis_url)) as proxy:
        client = await connect(at_port(redis_url, proxy.port))
        run = await Run.create(client, f"lossy-{os.urandom(4).hex()}", run_config(tmp_path), {})
        orchestrator, learner = ExperienceLog(run), ExperienceLog(run)
        await orchestrator.take(Writer.ORCHESTRATOR)
        await learner.take(Writer.LEARNER)
        await learner.begin(0)
        for index in range(4):
            proxy.lose = 1
            assert [admission.index for admission in await orchestrator.admit()] == [index]
            proxy.lose = 1
            await orchestrator.append(index, 1, b"payload", 0, 0.0)
            assert proxy.lose == 0
        proxy.lose = 1
        assert await learner.plan(1, 60) == await learner.find_plan(1)
        proxy.lose = 1
        await run.emit(DoneLearning())
        assert [record for _, record in await run.records("0", 0)] == [{"kind": "done_learning"}]
        audit = await learner.audit()
        assert audit.clean and audit.counts["planned"] == 4
        await client.aclose()


async def test_a_client_rides_over_what_passes_by_itself(own_server: EmbeddedServer, tmp_path: Path) -> None:
    """Simulates a failover: the new primary refuses writes until it has a replica."""
    client, other = await connect(own_server.url), await connect(own_server.url)
    run = await Run.create(client, "failing-over", run_config(tmp_path), {})
    await other.config_set("min-replicas-to-write", "1")
    writing = asyncio.gather(client.set("x", "1"), ExperienceLog(run).take(Writer.LEARNER))
    await asyncio.sleep(0.2)
    assert not writing.done()
    await other.config_set("min-replicas-to-write", "0")
    await writing
    assert await client.get("x") == b"1"
    await client.aclose()
    await other.aclose()


async def test_a_client_asks_its_address_again_where_the_primary_became_a_replica(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    client, other = await connect(own_server.url), await connect(own_server.url)
    run = await Run.create(client, "failed-over", run_config(tmp_path), {})
    before = await client.client_id()
    await other.replicaof("127.0.0.1", 1)
    writing = asyncio.gather(client.set("x", "1"), ExperienceLog(run).take(Writer.LEARNER))
    await asyncio.sleep(0.2)
    assert not writing.done()
    await other.replicaof("NO", "ONE")
    await writing
    assert await client.client_id() > before
    await client.aclose()
    await other.aclose()


async def test_a_closed_client_opens_no_further_connection(own_server: EmbeddedServer) -> None:
    client, other = await connect(own_server.url), await connect(own_server.url)
    waiting = asyncio.create_task(client.xread({"nothing": "$"}, block=60_000))
    while not any(each["cmd"] == "xread" for each in await other.client_list()):
        continue
    await client.aclose()
    with pytest.raises(StoreError):
        async with asyncio.timeout(20):
            await waiting
    assert len(await other.client_list()) == 1
    await other.aclose()


async def test_a_server_error_keeps_its_message(own_server: EmbeddedServer, tmp_path: Path) -> None:
    client = await connect(own_server.url)
    run = await Run.create(client, "refused", run_config(tmp_path), {})
    await client.set(run.key("terms"), "of another type")
    for asked in (client.hgetall(run.key("terms")), ExperienceLog(run).take(Writer.LEARNER)):
        with pytest.raises(StoreError, match="found WRONGTYPE Operation against a key"):
            await asked
    await client.config_set("min-replicas-to-write", "1")
    client.reconnect_timeout = 0.1
    for asked in (client.set("x", "1"), run.emit(DoneLearning())):
        with pytest.raises(StoreError, match="found NOREPLICAS"):
            await asked
    await client.aclose()


async def test_a_full_server_refuses_whole_changes_only(own_server: EmbeddedServer, tmp_path: Path) -> None:
    client = await connect(own_server.url)
    run = await Run.create(client, "full", run_config(tmp_path), {})
    orchestrator, learner = ExperienceLog(run), ExperienceLog(run)
    await orchestrator.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    await orchestrator.admit(4)
    for index in range(3):
        await orchestrator.append(index, 1, b"x" * 1000, 0, 0.0)
    await client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="Raise maxmemory"):
        await orchestrator.append(3, 1, b"x" * 1000, 0, 0.0)
    await orchestrator.drop(3, 1, "no room", 0.0)
    await client.config_set("maxmemory", "0")
    await orchestrator.admit()
    await orchestrator.append(4, 1, b"x", 0, 0.0)
    await client.config_set("maxmemory", "1")
    await learner.plan(1, 60)
    await learner.set_version(1)
    assert await learner.release(1) == 5  # commands that free memory always work
    assert (await learner.audit()).clean
    await client.aclose()


async def test_the_password_comes_from_the_environment_unless_the_url_has_one(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with await connect(own_server.url) as client:
        await client.config_set("requirepass", "right")
    url = as_user(own_server.url, "")
    with pytest.raises(StoreError, match="POLYREME_REDIS_PASSWORD"):
        await connect(url)
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", "right")
    async with await connect(url) as client:
        assert await client.ping()
    with pytest.raises(StoreError, match="to accept the login"):
        await connect(as_user(url, ":wrong"))
    with EmbeddedServer.start(tmp_path / "without") as server:
        async with await connect(server.url) as client:
            assert await client.ping()


async def test_a_script_survives_a_redis_that_restarts_again_while_it_is_loaded(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(own_server.url)
    log = ExperienceLog(await Run.create(client, "reloaded", run_config(tmp_path), {}))
    load = client.script_load
    restarts = iter(range(3))

    async def loaded_and_lost(script: bytes) -> bytes:
        digest: bytes = await load(script)
        if next(restarts, None) is not None:
            await client.script_flush()
        return digest

    monkeypatch.setattr(client, "script_load", loaded_and_lost)
    await client.script_flush()
    await log.take(Writer.ORCHESTRATOR)
    assert next(restarts, None) is None
    await client.aclose()


async def test_a_client_waits_for_a_redis_that_is_known_to_exist(own_server: EmbeddedServer) -> None:
    os.kill(own_server.pid, signal.SIGSTOP)
    with pytest.raises(StoreError):
        await connect(own_server.url, 0.5, socket_timeout=0.2)
    waiting = asyncio.create_task(connect(own_server.url, reconnect_timeout=300.0, socket_timeout=0.2))
    await asyncio.sleep(0.5)
    os.kill(own_server.pid, signal.SIGCONT)
    await (await waiting).aclose()


async def test_commands_beyond_the_connections_wait(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    client = await connect(redis_url)
    try:
        assert await asyncio.gather(*(client.ping() for _ in range(1000))) == [True] * 1000
    finally:
        await client.aclose()
    assert not caplog.records  # none was refused, and retried
