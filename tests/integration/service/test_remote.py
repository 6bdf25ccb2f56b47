"""A program on a training service: `RemoteService` at the real API."""

import asyncio
from pathlib import Path

from redis.asyncio import Redis

from polyreme.experience.requests import RequestLog
from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme.process.tasks import running
from polyreme_trainer.remote import RemoteService
from polyreme_trainer.service.api import ServiceApi
from polyreme_trainer.service.folders import Folders
from support.configs import run_config
from support.simulated_service import BASE, LONGEST, SIGNING_KEY, learner


class Impatient(RemoteService):
    CALL_SECONDS = 0.5


async def test_a_call_waits_longer_for_its_turn_than_for_an_answer(redis: Redis, run_id: str, tmp_path: Path) -> None:
    """Other tenants may have their turn for long, and the service says so."""
    log = RequestLog(redis, run_id)
    api = ServiceApi(log, Folders(tmp_path), BASE, str(tmp_path), "simulated", LONGEST, SIGNING_KEY, hold_seconds=0.05)

    def program(address: str) -> str:
        with Impatient.open(run_config(tmp_path), address) as service:
            return service.publish(1)

    async with log.following(), serve_http(loopback(), 0, api.app(), drain_timeout=1.0) as port:
        working = asyncio.create_task(asyncio.to_thread(program, f"http://{loopback()}:{port}"))
        await asyncio.wait({working}, timeout=2.0)
        async with running(learner(log, tmp_path).run(asyncio.Event())):
            assert (await working).endswith("/sampler_weights/version-1")
