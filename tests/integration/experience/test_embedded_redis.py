"""A run's own Redis server keeps its data, restarts at the same address, and ends with its owner."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from polyreme.errors import StoreError
from polyreme.experience.embedded_redis import EmbeddedServer, embedded_url
from polyreme.experience.store import connect
from support.proxy import port_of


async def test_data_survives_kill_9(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        client = await connect(server.url)
        await client.set("kept", "yes")
        os.kill(server.pid, signal.SIGKILL)
        await client.aclose()
    with EmbeddedServer.start(tmp_path) as server:
        client = await connect(server.url)
        assert await client.get("kept") == b"yes"
        await client.aclose()


async def test_a_dead_server_starts_again_where_it_was(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        client, url, pid = await connect(server.url), server.url, server.pid
        await client.set("kept", "yes")
        os.kill(pid, signal.SIGKILL)
        while server.alive:  # noqa: ASYNC110 (a process gives no event)
            await asyncio.sleep(0.01)
        await server.restart()
        assert (server.url, server.alive) == (url, True)
        assert server.pid != pid
        assert await client.get("kept") == b"yes"
        await client.aclose()
    assert not server.alive


async def test_others_are_served_while_a_dead_server_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, may_answer = EmbeddedServer._answers, threading.Event()
    with EmbeddedServer.start(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        while server.alive:  # noqa: ASYNC110 (a process gives no event)
            await asyncio.sleep(0.01)
        monkeypatch.setattr(EmbeddedServer, "_answers", lambda self: may_answer.is_set() and answers(self))  # a long load
        restarting = asyncio.create_task(server.restart())
        for _ in range(20):
            await asyncio.sleep(0.02)
        assert not restarting.done()
        may_answer.set()
        await asyncio.wait_for(restarting, 300)
        assert server.alive


async def test_a_restart_that_is_cancelled_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        server.stop()
        monkeypatch.setattr(EmbeddedServer, "_answers", lambda _: False)  # loads until the restart is cancelled
        restarting = asyncio.create_task(server.restart())
        await asyncio.sleep(0)
        restarting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restarting
        assert not server.alive


async def test_only_who_knows_its_password_commands_it_and_only_its_user_can_read_that(tmp_path: Path) -> None:
    (data := tmp_path / 'a "quoted" \\ name').mkdir(mode=0o755)
    with EmbeddedServer.start(data) as server:
        bare = f"redis://127.0.0.1:{port_of(server.url)}/0"
        with pytest.raises(StoreError, match="to accept the login"):
            await connect(bare)
        async with await connect(embedded_url(data, bare)) as client:
            assert await client.ping()
        secret = (data / "password").read_text()
        assert len(secret) >= 32
        assert secret not in " ".join(psutil.Process(server.pid).cmdline())
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE((data / "password").stat().st_mode) == 0o600
    assert [path for path in data.iterdir() if path.is_dir()], "the append-only files are there"
    with EmbeddedServer.start(data):
        assert (data / "password").read_text() == secret, "replicas that know it find the Redis again"


async def test_a_port_that_another_process_took_costs_the_password(own_server: EmbeddedServer, tmp_path: Path) -> None:
    """Replicas of the previous start may have sent it there."""
    passwords = []
    for port in (0, port_of(own_server.url)):
        server = await EmbeddedServer.open(tmp_path, port)
        passwords.append((tmp_path / "password").read_text())
        assert port_of(server.url) != port_of(own_server.url)
        server.stop()
    assert passwords[0] != passwords[1]


def test_every_server_has_its_own_password(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "password").touch()  # a full disk left it empty
    for name in ("one", "two"):
        EmbeddedServer.start(tmp_path / name).stop()
    assert (tmp_path / "one" / "password").read_text() != (tmp_path / "two" / "password").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_password_that_another_user_may_know_is_not_used(tmp_path: Path) -> None:
    for name, mode in (("given", 0o600), ("read", 0o644), ("link", 0o600)):
        (data := tmp_path / name).mkdir()
        real = data / ("real" if name == "link" else "password")
        real.write_text("theirs")
        real.chmod(mode)
        if name == "link":
            (data / "password").symlink_to(real)
        os.chown(real, 12_345 if name == "given" else 0, -1)
        EmbeddedServer.start(data).stop()
        assert len((data / "password").read_text()) == 64 and not (data / "password").is_symlink()
        assert {path.name for path in data.iterdir()} >= {"password"} and not list(data.glob(".password-*"))
    (theirs := tmp_path / "theirs").mkdir()
    os.chown(theirs, 12_345, -1)
    with pytest.raises(StoreError, match="of this user"):
        EmbeddedServer.start(theirs)
    assert not list(theirs.iterdir())


def test_the_last_words_of_a_server(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        assert server.last_words() == ""
        with open(tmp_path / "redis.log", "a") as log:
            log.write("9657:M 20 Nov 2026 16:32:15.842 # Error writing to the AOF file: No space left on device\n")
        assert server.last_words() == "Error writing to the AOF file: No space left on device"


def test_a_taken_port(own_server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Redis to start on port") as caught:
        EmbeddedServer.start(tmp_path / "other", port=port_of(own_server.url))
    assert "in use" in str(caught.value)


def test_stopping_twice_leaves_nothing(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    server.stop()
    server.stop()
    assert not psutil.pid_exists(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from polyreme.experience.embedded_redis import EmbeddedServer\n"
        "print(EmbeddedServer.start(Path(sys.argv[1])).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        gone, alive = psutil.wait_procs([server], timeout=300)
    assert gone and not alive
