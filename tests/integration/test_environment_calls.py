"""Calls of many episodes in one worker process: what runs at the same time, and what one that does not end costs the others."""

import asyncio
import os
import signal

import grpc
import psutil
import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme_environment.episode_pool import EpisodePool
from polyreme_environment.metrics import EnvironmentMetrics
from support.environment_stream import serving

TOGETHER = 6
CODE = (
    f"TOGETHER = {TOGETHER}"
    + '''
import asyncio, os, sqlite3, threading, time

told, log, local = threading.Event(), [], threading.local()
barrier, async_barrier = threading.Barrier(TOGETHER), asyncio.Barrier(TOGETHER)

class Sync:
    """Does what an answer says."""
    def __init__(self):
        self.kept = sqlite3.connect(":memory:")
    def reset(self, row):
        self.kept.execute("CREATE TABLE kept (word TEXT)")
    def step(self, message):
        self.kept.execute("INSERT INTO kept VALUES (?)", [message])
        return getattr(self, message)(), float(os.getpid()), False
    def close(self):
        log.append("closed")
    def pid(self): return "hello"
    def meet(self): return str(barrier.wait())
    def hang(self):
        log.append("hangs")
        told.wait()
        log.append("goes on")
        return "late"
    def tell(self):
        told.set()
        return "told"
    def hear(self): return " ".join(["log:", *log])
    def thread(self): return str(threading.current_thread() is threading.main_thread())
    def count(self):
        local.count = getattr(local, "count", 0) + 1
        return str(local.count)

class Async:
    """Does what an answer says."""
    def reset(self, row): pass
    async def step(self, message): return await getattr(self, message)(), float(os.getpid()), False
    async def pid(self): return "hello"
    async def meet(self): return str(await async_barrier.wait())
    async def hang(self): await asyncio.Event().wait()
    async def refuse(self):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
    async def block(self): time.sleep(1000)

class Tools:
    """Both kinds of tools."""
    reward, done = 0.0, False
    def reset(self, **row): pass
    def meet(self) -> str:
        """Meets."""
        return str(barrier.wait())
    async def meet_async(self) -> str:
        """Meets."""
        return str(await async_barrier.wait())
'''
)
CLOSING = """
class Closing:
    def reset(self, row): pass
    def step(self, message): pass
    def close(self): open("{closed}", "w").close()
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "environment.py"
    path.write_text(CODE)
    return EnvironmentConfig(file=path, start_timeout=60.0)


def playing(config, name, **changes):
    return serving(config.model_copy(update={"name": name, **changes}))


async def begun(stream, count):
    """Episodes that have begun, each once the server has room for it."""
    episodes = []
    while len(episodes) < count:
        if (await (episode := stream()).start()) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            episodes.append(episode)
    return episodes


def text(ask):
    return ask.messages[0].content


async def heard(episode, log):
    """Waits until the log in its process is this one."""
    while text(await episode.answer("hear")) != f"log: {log}":
        pass


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("Sync", "meet"),
        ("Async", "meet"),
        ("Tools", '<tool_call>{"name": "meet", "arguments": {}}</tool_call>'),
        ("Tools", '<tool_call>{"name": "meet_async", "arguments": {}}</tool_call>'),
    ],
)
async def test_calls_of_different_episodes_are_inside_together(config, name, answer):
    async with playing(config, name, worker_calls=TOGETHER) as (_, stream):
        episodes = await begun(stream, TOGETHER)
        met = await asyncio.gather(*(episode.answer(answer) for episode in episodes))
        assert sorted(map(text, met)) == [str(place) for place in range(TOGETHER)], "each place at the barrier once"


async def test_one_call_at_a_time_is_made_in_the_main_thread(config):
    async with playing(config, "Sync", worker_calls=1) as (_, stream):
        episodes = await begun(stream, 3)
        assert {text(each) for each in await asyncio.gather(*(episode.answer("thread") for episode in episodes))} == {"True"}


async def test_more_calls_than_fit_wait_for_their_turn(config):
    async with playing(config, "Sync", worker_calls=TOGETHER) as (_, stream):
        episodes = await begun(stream, 2 * TOGETHER)
        met = await asyncio.gather(*(episode.answer("meet") for episode in episodes))
        assert sorted(map(text, met)) == sorted(2 * [str(place) for place in range(TOGETHER)])


async def test_an_episode_is_closed_after_a_call_whose_caller_left(config):
    async with playing(config, "Sync") as (_, stream):
        left, witness = await begun(stream, 2)
        calling = asyncio.create_task(left.answer("hang"))
        await heard(witness, "hangs")
        left.call.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await witness.answer("tell")
        await heard(witness, "hangs goes on closed")


async def test_what_an_episode_keeps_in_its_thread_is_its_own(config):
    async with playing(config, "Sync") as (_, stream):
        first, witness = await begun(stream, 2)
        assert [text(await first.answer("count")) for _ in range(2)] == ["1", "2"], "one thread for all calls"
        first.call.cancel()
        await heard(witness, "closed")
        (second,) = await begun(stream, 1)
        assert text(await second.answer("count")) == "1"


async def test_an_episode_of_a_server_that_ends_is_closed(tmp_path):
    (path := tmp_path / "closing.py").write_text(CLOSING.format(closed=tmp_path / "closed"))
    pool = EpisodePool(EnvironmentConfig(file=path, start_timeout=60.0), EnvironmentMetrics())
    await pool.start()
    try:
        async with pool.episode() as episode:
            await episode.reset({}, 0)
            pool.draining = True
    finally:
        await pool.close()
    assert (tmp_path / "closed").exists()


async def test_a_thread_that_hangs_costs_the_others_nothing(config):
    async with playing(config, "Sync", step_timeout=2.0) as (_, stream):
        bad, other = await begun(stream, 2)
        before = (await other.answer("pid")).reward
        calling = asyncio.create_task(bad.answer("hang"))
        assert (await other.answer("pid")).reward == before, "during the call"
        assert "within environment.step_timeout = 2 s" in (await calling).error
        assert await bad.read() is grpc.StatusCode.OK
        (new,) = await begun(stream, 1)
        assert (await new.answer("pid")).reward != before, "another process"
        assert text(await other.answer("tell")) == "told"  # the call ends late
        await heard(other, "hangs goes on")
        assert (await other.answer("pid")).reward == before
        former = psutil.Process(int(before))
        other.call.cancel()
        await asyncio.to_thread(former.wait, 30)
        assert text(await new.answer("pid")) == "hello"


async def test_a_second_thread_that_hangs_ends_what_the_first_left(config):
    async with playing(config, "Sync", step_timeout=0.5) as (_, stream):
        first = await begun(stream, 2)
        assert (await first[0].answer("hang")).error
        second = await begun(stream, 2)
        assert (await second[0].answer("hang")).error
        (new,) = await begun(stream, 1)
        assert await first[1].answer("pid") is grpc.StatusCode.ABORTED, "its process has ended"
        assert text(await second[1].answer("pid")) == "hello" and text(await new.answer("pid")) == "hello"


@pytest.mark.parametrize("act", ["hang", "refuse"])
async def test_a_coroutine_that_does_not_end_costs_the_others_nothing(config, act):
    async with playing(config, "Async", step_timeout=1.0) as (_, stream):
        bad, other = await begun(stream, 2)
        before = (await other.answer("pid")).reward
        assert "within environment.step_timeout = 1 s" in (await bad.answer(act)).error
        assert (await other.answer("pid")).reward == before
        assert await bad.read() is grpc.StatusCode.OK
        new = stream()
        if act == "hang":
            await new.start()
            assert (await new.answer("pid")).reward == before, "a cancelled coroutine leaves its process as it was"


async def test_a_blocked_event_loop_is_the_fault_of_the_call_inside(config):
    async with playing(config, "Async", step_timeout=1.0) as (_, stream):
        waiting, bad, idle = await begun(stream, 3)
        calls = [asyncio.create_task(waiting.answer("hang")), asyncio.create_task(bad.answer("block"))]
        lost, failed = await asyncio.gather(*calls)
        assert lost is grpc.StatusCode.ABORTED, "its deadline was the first, but it may be played again"
        assert failed.error
        assert await idle.answer("pid") is grpc.StatusCode.ABORTED


async def test_a_killed_process_is_nobodys_fault(config):
    async with playing(config, "Sync") as (_, stream):
        episodes = await begun(stream, 3)
        pid = int((await episodes[0].answer("pid")).reward)
        calls = [asyncio.create_task(episode.answer("hang")) for episode in episodes[:2]]
        await heard(episodes[2], "hangs hangs")
        os.kill(pid, signal.SIGKILL)
        found = [*await asyncio.gather(*calls), await episodes[2].answer("pid")]
        assert found == [grpc.StatusCode.ABORTED] * 3
