"""A script's change is with Redis's replicas before its call returns."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from support.configs import run_config
from support.waiting import until


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """A primary that asks for one replica, and that replica."""
    primary, replica = EmbeddedServer.start(folder / "primary"), EmbeddedServer.start(folder / "replica")
    try:
        address = urlsplit(primary.url)
        async with Redis.from_url(primary.url) as client, Redis.from_url(replica.url) as other:
            await client.config_set("min-replicas-to-write", 1)
            await other.config_set("masterauth", address.password)
            await other.replicaof(address.hostname, address.port)

            async def follows() -> bool:
                return (await other.info("replication"))["master_link_status"] == "up"

            await until(follows, 60)
        yield primary, replica
    finally:
        os.kill(replica.pid, signal.SIGCONT)
        replica.stop()
        primary.stop()


async def test_a_change_is_acknowledged_when_a_replica_has_it(tmp_path: Path, run_id: str) -> None:
    async with pair(tmp_path) as (primary, replica):
        redis = await connect(primary.url)
        os.kill(replica.pid, signal.SIGSTOP)  # the primary takes writes until it misses the replica for ten seconds
        creating = asyncio.create_task(Run.create(redis, run_id, run_config(tmp_path), {"config.json": b"{}"}))
        async with Redis.from_url(primary.url) as client:

            async def waits() -> bool:
                return any(each["cmd"] == "wait" for each in await client.client_list())

            await until(waits, 60)
            assert not creating.done() and await client.keys(f"*{run_id}*")
            os.kill(replica.pid, signal.SIGCONT)
            run = await creating
            os.kill(primary.pid, signal.SIGKILL)
        async with Redis.from_url(replica.url) as other:
            assert await other.exists(run.key("meta"))
        await redis.aclose()
