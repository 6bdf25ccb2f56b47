"""The page's threads are few and bounded, and can have a low priority."""

import asyncio
import os
import sys
import threading

import pytest

from polyreme.page.threads import THREADS, WAITING, PageThreads, TooBusyError

SECONDS = 60


async def test_requests_beyond_the_bound_are_refused_and_the_others_answered() -> None:
    threads, go = PageThreads(), threading.Event()
    waiting = [asyncio.create_task(threads.run(go.wait, SECONDS)) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooBusyError):
        await threads.run(len, "x")
    go.set()
    assert all(await asyncio.gather(*waiting))
    assert await threads.run(len, "abc") == 3
    threads.close()


async def test_slow_answers_leave_the_threads_of_the_process_alone() -> None:
    threads, go = PageThreads(), threading.Event()
    waiting = [asyncio.create_task(threads.run(go.wait, SECONDS)) for _ in range(2 * THREADS)]
    assert await asyncio.wait_for(asyncio.to_thread(len, "abc"), SECONDS) == 3
    go.set()
    assert all(await asyncio.gather(*waiting))
    threads.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
async def test_its_threads_come_after_those_of_the_process() -> None:
    threads = PageThreads(niceness=3)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = await threads.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert found == min(own + 3, 19) and os.getpriority(os.PRIO_PROCESS, 0) == own
    threads.close()
