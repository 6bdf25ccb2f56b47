"""A whole run on the sessions of a product, whose processes are killed while it goes on."""

import asyncio
import os
import signal
from collections import Counter

import httpx
import openai
import psutil
import pytest

from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.online import OnlineSessions
from support.processes import command_line
from support.product import HELLO, KEY, Product
from support.simulated_run import simulated_run

BROKEN = (httpx.TransportError, openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
TASKS = 2


class Users:
    """Users of a product, who try again when something breaks.

    Attributes:
        rewarded: the sessions whose reward was acknowledged.
    """

    def __init__(self, run, http):
        self._run, self._http, self.rewarded = run, http, []

    async def use(self, number):
        while True:
            opened = await self._try(lambda product: product.open(f"task {number % TASKS}"))
            reply = await self._try(lambda product, opened=opened: product.say(opened, HELLO))
            back = {"role": "assistant", "content": reply.choices[0].message.content}
            try:
                await self._try(lambda product, opened=opened, back=back: product.say(opened, HELLO, back, HELLO))
            except (openai.BadRequestError, openai.AuthenticationError):  # its policy has become too old meanwhile
                continue
            status = await self._try(lambda product, opened=opened: product.reward(opened["id"], number % 2))
            assert status in (200, 410)
            self.rewarded += [opened["id"]] if status == 200 else []

    async def _try(self, act):
        while True:
            for lease in await Registry(self._run).leases("environment"):
                try:
                    return await act(Product(lease.http_address, self._http))
                except BROKEN:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_run_survives_the_death_of_each_process(redis_url, run_id, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYREME_ONLINE_KEY", KEY)
    settings = {"environment": {"online": {}, "episodes": 8}, "reward": None, "group_size": 2, "groups_per_iteration": 2}
    async with (
        simulated_run(redis_url, run_id, tmp_path, iterations=8, max_staleness=2, **settings) as started,
        httpx.AsyncClient(timeout=30.0) as http,
    ):
        users = Users(started.run, http)
        using = [asyncio.create_task(users.use(number)) for number in range(4)]
        orchestrator = "polyreme_trainer.orchestrator"
        for iteration, name in enumerate(("environment", orchestrator, "rollout-0", "environment", orchestrator), 1):
            await started.run.until(lambda iteration=iteration: reached(started.run, iteration), within=240)
            if name == orchestrator:
                children = psutil.Process(started.children["train"].pid).children(recursive=True)
                for child in children:
                    if orchestrator in command_line(child):
                        child.kill()
            else:
                os.kill(started.children[name].pid, signal.SIGKILL)
                await started.children[name].wait()
                started.start(name)
        state, reason = await started.ended(300)
        assert (state, reason) == ("done", ""), started.logs()
        for task in using:
            assert not task.done(), task.exception()
            task.cancel()
        log, store = ExperienceLog(started.run), OnlineSessions(started.run)
        assert (await log.audit()).clean
        kept = [await store.read(id) for id in users.rewarded]
        assert {session.state for session in kept} <= {"trained", "rewarded", "dropped"}
        assert {session.reason for session in kept if session.state == "dropped"} <= {"stale"}
        members = Counter(session.group for session in kept if session.state == "trained")
        assert set(members.values()) <= {1, 2} and sum(members.values()) >= 28  # a kill may hide an acknowledgement from its user
        counts = await store.counts()
        assert counts["trained"] >= 8 * 2 * 2 and counts["trained"] % 2 == 0
        records = await started.records("rollout")
        assert records[-1]["online/trained"] >= 8 * 2 * 2


async def reached(run, iteration):
    return True if await ExperienceLog(run).version() >= iteration else None
