"""A whole run on the sessions of a product, whose processes are killed while it goes on."""

import asyncio
import os
import signal
from collections import Counter

import httpx
import openai
import psutil
import pytest

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.online import OnlineSessions
from support.processes import command_line
from support.product import HELLO, KEY, Product
from support.simulated_run import simulated_run
from support.waiting import until

BROKEN = (httpx.TransportError, openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
TASKS = 2
KILLED = ("environment", "orchestrator", "redis", "rollout-0", "learner", "redis", "environment", "learner", "orchestrator")


class Users:
    """Users of a product, who try again when something breaks. Every other one reads streams.

    Attributes:
        rewarded: the sessions whose reward was acknowledged.
    """

    def __init__(self, run, http):
        self._run, self._http, self.rewarded = run, http, []

    async def use(self, number):
        say = self._read if number % 4 < 2 else self._say
        while True:
            opened = await self._try(lambda product: product.open(f"task {number % TASKS}"))
            try:
                text = await self._try(lambda product, opened=opened: say(product, opened, HELLO))
                said = [HELLO, {"role": "assistant", "content": text}, HELLO]
                await self._try(lambda product, opened=opened, said=said: say(product, opened, *said))
            except (openai.BadRequestError, openai.AuthenticationError):  # its policy has become too old meanwhile
                continue
            status = await self._try(lambda product, opened=opened: product.reward(opened["id"], number % 2))
            assert status in (200, 410)
            self.rewarded += [opened["id"]] if status == 200 else []

    async def _say(self, product, opened, *messages):
        return (await product.say(opened, *messages)).choices[0].message.content

    async def _read(self, product, opened, *messages):
        try:
            async with product.streamed(opened, *messages) as texts:
                return "".join([text async for text in texts])
        except openai.APIError as error:
            if type(error) is not openai.APIError:  # it has a status
                raise
            raise httpx.ReadError(f"broken in mid-stream: {error}") from error

    async def _try(self, act):
        while True:
            for lease in await Registry(self._run).leases("environment"):
                try:
                    return await act(Product(lease.http_address, self._http))
                except BROKEN:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)


async def kill(started, redis, name):
    """Kills a process of a run. What has no supervisor starts again."""
    if name == "redis":
        os.kill(redis.pid, signal.SIGKILL)
        await until(lambda: not redis.alive)
        await redis.restart()
    elif name in started.children:
        os.kill(started.children[name].pid, signal.SIGKILL)
        await started.children[name].wait()
        started.start(name)
    else:
        children = psutil.Process(started.children["train"].pid).children(recursive=True)
        (process,) = [child for child in children if any(word.endswith(name) for word in command_line(child))]
        process.kill()


@pytest.mark.slow
async def test_a_run_survives_the_death_of_each_process(run_id, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYREME_ONLINE_KEY", KEY)
    settings = {"environment": {"online": {}, "episodes": 8}, "reward": None, "group_size": 2, "groups_per_iteration": 2}
    (tmp_path / "run").mkdir()
    slow = {"replicas": ("--step-seconds", "0.01"), "iterations": len(KILLED) + 3, "max_staleness": 2}
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with (
            simulated_run(redis.url, run_id, tmp_path / "run", **slow, **settings) as started,
            httpx.AsyncClient(timeout=60.0) as http,
        ):
            users = Users(started.run, http)
            using = [asyncio.create_task(users.use(number)) for number in range(4)]
            for iteration, name in enumerate(KILLED, 1):
                await started.run.until(lambda iteration=iteration: reached(started.run, iteration), within=240)
                await kill(started, redis, name)
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
            # A kill may hide an acknowledgement from its user.
            assert set(members.values()) <= {1, 2} and sum(members.values()) >= 4 * slow["iterations"] - len(KILLED)
            counts = await store.counts()
            assert counts["trained"] >= 4 * slow["iterations"] and counts["trained"] % 2 == 0
            records = await started.records("rollout")
            assert records[-1]["online/trained"] >= 4 * slow["iterations"]


async def reached(run, iteration):
    return True if await ExperienceLog(run).version() >= iteration else None
