"""Three Redis nodes and their Sentinels, as real processes on addresses of loopback: the chart's, and an operator's with TLS."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from polyreme.experience.embedded_redis import redis_binary
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.store import connect
from polyreme_trainer.testing.simulated_engine import after_plan, newest
from support import tls_redis
from support.certificates import Issued, issue
from support.proxy import Proxy, bad_network
from support.simulated_run import simulated_run
from support.tls_redis import NO_TLS_REDIS, OPERATOR, SENTINEL, TLS_REDIS, USER, operator, server_settings, settings, started

ROOT = Path(__file__).resolve().parents[2]
HOSTS = [f"127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{number}" for number in (1, 2, 3)]
PASSWORD = "correct-horse"


class Node:
    """A pod of the stateful set: a server and a Sentinel, started by the chart's script."""

    def __init__(self, host: str, folder: Path) -> None:
        self.host, self._folder, self._processes = host, folder, list[subprocess.Popen[bytes]]()

    def start(self) -> None:
        state = self._folder / self.host
        state.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{self._folder}:/usr/bin:/bin",
            "POLYREME_REDIS_PASSWORD": PASSWORD,
            **{"NODE": self.host, "BIND": self.host, "FIRST": HOSTS[0], "STATE": str(state)},
        }
        script = ROOT / "deploy" / "helm" / "polyreme" / "files" / "redis.sh"
        for part in ("server", "sentinel"):
            with (state / f"{part}.log").open("ab") as log:
                self._processes.append(subprocess.Popen(["sh", script, part], env=environment, stdout=log, stderr=log))

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def ready(self) -> bool:
        """What the pod's readiness probe finds."""
        probe = [sys.executable, ROOT / "deploy" / "docker" / "healthy.py", f"primary://{self.host}:6379"]
        done = subprocess.run(probe, env={"POLYREME_REDIS_PASSWORD": PASSWORD}, capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def client(self, port: int = 6379) -> Redis:
        return Redis(host=self.host, port=port, password=PASSWORD, socket_timeout=5)


class TlsNode(Node):
    """A server and a Sentinel as an operator sets them up: all connections have TLS, and the Sentinels have a password of their own."""

    issued: ClassVar[Issued]

    def start(self) -> None:
        (state := self._folder / self.host).mkdir(exist_ok=True)
        server = server_settings(self.issued, state, self.host, 6379) + (
            f"masterauth {OPERATOR}\nmin-replicas-to-write 1\nmin-replicas-max-lag 10\nreplica-announce-ip {self.host}\n"
        )
        if self.host != HOSTS[0]:
            server += f"replicaof {HOSTS[0]} 6379\n"
        sentinel = settings(self.issued, self.host, 26379) + (
            f"requirepass {SENTINEL}\nsentinel sentinel-pass {SENTINEL}\nsentinel monitor polyreme {HOSTS[0]} 6379 2\n"
            f"sentinel auth-pass polyreme {OPERATOR}\nsentinel down-after-milliseconds polyreme 5000\n"
            f"sentinel failover-timeout polyreme 30000\nsentinel announce-ip {self.host}\n"
        )
        self._processes += [started(state, "server", server), started(state, "sentinel", sentinel, "--sentinel")]

    def ready(self) -> bool:
        try:
            with operator(self.issued, self.host, 6379) as client:
                found = client.info("replication")
        except RedisError:
            return False
        return found["role"] == "master" and found["connected_slaves"] > 0

    def client(self, port: int = 6379) -> Redis:
        password = OPERATOR if port == 6379 else SENTINEL
        return Redis(host=self.host, port=port, password=password, ssl=True, ssl_ca_certs=str(self.issued.ca), socket_timeout=5)


@contextmanager
def running(found: list[Node], folder: Path) -> Iterator[list[Node]]:
    try:
        for node in found:
            node.start()
        yield found
    finally:
        for node in found:
            node.kill()
        for log in sorted(folder.glob("*/*.log")):  # pytest shows it where the test failed
            print(f"{log.parent.name} {log.name}:\n{log.read_text()}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    (tmp_path / "redis-server").symlink_to(redis_binary())
    with running([Node(host, tmp_path) for host in HOSTS], tmp_path) as found:
        yield found


@pytest.fixture
def tls_nodes(tmp_path: Path) -> Iterator[list[Node]]:
    TlsNode.issued = issue(tmp_path / "tls", *HOSTS)
    with running([TlsNode(host, tmp_path) for host in HOSTS], tmp_path) as found:
        yield found


async def until_ready(nodes: list[Node], count: int = 1) -> Node:
    """The node to which the service leads, once there are `count` replicas of it."""
    async with asyncio.timeout(120):
        while True:
            for node in [each for each in nodes if each.ready()]:
                async with node.client() as client:
                    if (await client.info("replication"))["connected_slaves"] >= count:
                        return node
            await asyncio.sleep(0.2)


async def until_sentinels_agree(nodes: list[Node]) -> None:
    """Waits until each Sentinel knows the others, of whom two must agree on a failover, and both replicas.

    A Sentinel asks the primary for its replicas every 10 s. What it has not heard of when the primary dies, it cannot let follow another.
    """
    async with asyncio.timeout(60):
        for node in nodes:
            async with node.client(26379) as sentinel:
                while True:
                    state = await sentinel.sentinel_master("polyreme")
                    if state["num-other-sentinels"] == state["num-slaves"] == len(nodes) - 1:
                        break
                    await asyncio.sleep(0.2)


@pytest.mark.real
@pytest.mark.timeout(400)
async def test_a_failover_keeps_writes_and_never_has_two_primaries(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    first = await until_ready(nodes, 2)
    assert first.host == HOSTS[0]
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", PASSWORD)
    client = await connect(f"redis://{first.host}:6379/0")  # checks the settings that a run needs
    for number in range(100):
        await client.set(f"key:{number}", number)
    assert await client.execute_command("WAIT", 2, 10_000) == 2
    await client.aclose()
    await until_sentinels_agree(nodes)

    first.kill()
    second = await until_ready(nodes)
    assert second is not first
    async with second.client() as client:
        assert [int(await client.get(f"key:{number}")) for number in range(100)] == [*range(100)]
        await client.set("after", "failover")

    # Its own Sentinel has not seen the failover, so it starts as a primary. It must not take a write.
    first.start()
    async with asyncio.timeout(120), first.client() as client:
        while True:
            with suppress(RedisError, OSError):
                assert not first.ready()
                with pytest.raises(RedisError):
                    await client.set("split", "brain")
                if (await client.info("replication"))["role"] == "slave" and await client.get("after") == b"failover":
                    break
            await asyncio.sleep(0.2)
    assert (await until_ready(nodes, 2)) is second


@asynccontextmanager
async def service(nodes: list[Node]) -> AsyncIterator[Proxy]:
    """The address of the chart's Service: a connection leads to the node that is ready."""

    async def follow(proxy: Proxy) -> None:
        while True:
            ready = await asyncio.gather(*(asyncio.to_thread(node.ready) for node in nodes))
            for node in [node for node, is_ready in zip(nodes, ready, strict=True) if is_ready]:
                proxy.lead_to(node.host, 6379)
            await asyncio.sleep(0.2)

    async with bad_network(nodes[0].host, 6379) as proxy:
        following = asyncio.create_task(follow(proxy))
        try:
            yield proxy
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def loses_no_sample(url: str, run_id: str, folder: Path, first: Node) -> None:
    """Kills the primary in mid-run. Each iteration is trained once, and on the samples that it planned."""
    iterations = 60
    async with simulated_run(url, run_id, folder, iterations=iterations, trainer={"save_interval": 10}) as started:
        log = ExperienceLog(started.run)
        async with asyncio.timeout(300):
            while await log.version() < iterations // 3:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.05)
        await asyncio.to_thread(first.kill)
        killed, trained = time.monotonic(), await log.version()
        async with asyncio.timeout(300):
            while await log.version() <= trained + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        print(f"{time.monotonic() - killed:.1f} s from the kill to the next iteration")
        assert await started.ended(600) == ("done", ""), started.logs()
        assert (audit := await log.audit()).clean, audit
        assert [record["iteration"] for record in await started.records("iteration")] == [*range(1, iterations + 1)]
        plans = bytes(32)
        for iteration in range(1, iterations + 1):
            plan = await log.find_plan(iteration)
            assert plan is not None
            plans = after_plan(plans, plan.iteration, plan.indices)
        last = newest(folder / "run" / "checkpoints")
        assert last is not None and (last.version, last.plans) == (iterations, plans)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_run_loses_no_acknowledged_sample_in_a_failover(
    nodes: list[Node], run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await until_ready(nodes, 2)
    await until_sentinels_agree(nodes)
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", PASSWORD)
    async with service(nodes) as proxy:
        await loses_no_sample(f"redis://127.0.0.1:{proxy.port}/0", run_id, tmp_path, first)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(TLS_REDIS is None, reason=NO_TLS_REDIS)
async def test_nor_with_tls_users_and_a_url_of_sentinels(
    tls_nodes: list[Node], run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await until_ready(tls_nodes, 2)
    await until_sentinels_agree(tls_nodes)
    monkeypatch.setenv("POLYREME_REDIS_PASSWORD", tls_redis.PASSWORD)
    monkeypatch.setenv("POLYREME_SENTINEL_PASSWORD", SENTINEL)
    further = ",".join(f"{host}:26379" for host in HOSTS[1:])
    url = f"rediss://{USER}@{HOSTS[0]}:26379/0?sentinel=polyreme&sentinels={further}&ssl_ca_certs={TlsNode.issued.ca}"
    await loses_no_sample(url, run_id, tmp_path, first)
