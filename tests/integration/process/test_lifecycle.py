"""Signals of a service: the first one asks it to end, the second one ends it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import OWNER_DIED, Child, until_set
from support.waiting import wait_until

SERVICE = """
import asyncio, time
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import exit_on_error, stop_event

async def serve():
    stop = stop_event()
    print("up", flush=True)
    time.sleep(BUSY)
    try:
        await stop.wait()
        print("draining", flush=True)
        await asyncio.sleep(600)
    finally:
        print("tidied", flush=True)

with exit_on_error("service"):
    run_service(serve())
"""
INT, TERM = signal.SIGINT, signal.SIGTERM

ORPHAN = """
import asyncio
from polyreme.process import lifecycle
from polyreme.process.event_loop import run_service

lifecycle.EXIT_SECONDS = 1

async def serve():
    stop = lifecycle.stop_event()
    print("up", flush=True)
    async with lifecycle.until_set(stop):
        await asyncio.Event().wait()
    print("stopping", stop.orphaned.is_set(), flush=True)
    await stop.orphaned.wait()
    print("orphaned", flush=True)
    if HANGS:
        await asyncio.Event().wait()

run_service(serve())
"""
STARTS = """
import time
from polyreme.process import lifecycle

def wait():
    while True:  # a signal that comes just before a sleep is handled after it
        time.sleep(0.05)

class Busy:
    def __del__(self):
        wait()

lifecycle.exit_at_once_on_sigterm()
print("up", flush=True)
"""
LOSES_EXIT = """
import time
from polyreme.process import lifecycle

lifecycle.EXIT_SECONDS = 1

class Waits:
    def __del__(self):
        print("up", flush=True)
        while True:  # a signal that comes just before a sleep is handled after it
            time.sleep(0.05)

lifecycle.exit_on_signals()
Waits()
print("lost", flush=True)
time.sleep(600)
"""


def test_a_group_is_ended_with_its_leader_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, the number of the group may belong to another process."""
    ended: list[int] = []
    child = Child.spawn("short", [sys.executable, "-S", "-c", ""])
    monkeypatch.setattr(os, "killpg", lambda pid, _: ended.append(pid))
    assert run_service(child.wait()) == 0
    child.kill()
    child.kill()
    assert ended == [child.pid]


def is_pending(pid: int, number: int) -> bool:
    """Whether a process has a pending signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("after", ["wait()", "Busy()"], ids=["in a call", "where an exception is lost"])
def test_a_server_that_starts_ends_well_at_once(after: str) -> None:
    script = STARTS + after
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == "up\n"
        service.send_signal(TERM)
        assert service.wait(300) == 0
    finally:
        service.kill()
        service.communicate()


@pytest.mark.parametrize("numbers", [(INT, INT), (TERM, TERM), (INT, TERM)])
@pytest.mark.parametrize("busy", [0.0, 1.0], ids=["one after the other", "both while it is busy"])
def test_a_second_signal_ends_a_service_that_drains(numbers: tuple[int, int], busy: float) -> None:
    script = SERVICE.replace("BUSY", str(busy))
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == "up\n"
        service.send_signal(numbers[0])
        if not busy:
            assert service.stdout.readline() == "draining\n"
        wait_until(lambda: not is_pending(service.pid, numbers[0]))  # two pending signals of the same kind count as one
        service.send_signal(numbers[1])
        output, _ = service.communicate(timeout=300)
    finally:
        service.kill()
        service.wait()
    assert service.returncode == 130
    assert output.splitlines()[-1] == "tidied" and "Traceback" not in output


def test_a_hang_up_drains_however_often_it_comes() -> None:
    # As in a terminal, even if this process ignores hang-ups, which a child would inherit.
    script = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + SERVICE.replace("BUSY", "0.0")
    service = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == "up\n"
        service.send_signal(signal.SIGHUP)
        assert service.stdout.readline() == "draining\n"
        service.send_signal(signal.SIGHUP)
        service.send_signal(TERM)
        output, _ = service.communicate(timeout=300)
    finally:
        service.kill()
        service.wait()
    assert service.returncode == 130, output


@pytest.mark.skipif(sys.platform != "linux", reason="reads which signals a process ignores in /proc")
def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SERVICE.replace("BUSY", "0.0")
    service = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == "up\n"
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{service.pid}/status").read_text().splitlines())
        assert int(status["SigIgn"], 16) >> (signal.SIGHUP - 1) & 1
    finally:
        service.kill()
        service.communicate()


def python(script: str) -> "subprocess.Popen[str]":
    """A process that has printed "up"."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("first", [OWNER_DIED, TERM])
@pytest.mark.parametrize(("hangs", "status"), [(False, 0), (True, -signal.SIGALRM)])
def test_a_service_learns_of_its_owners_death_also_while_it_drains_and_cannot_outlive_it(
    first: signal.Signals, hangs: bool, status: int
) -> None:
    service = python(ORPHAN.replace("HANGS", str(hangs)))
    try:
        assert service.stdout is not None
        service.send_signal(first)
        assert service.stdout.readline() == f"stopping {first == OWNER_DIED}\n"
        if first != OWNER_DIED:
            service.send_signal(OWNER_DIED)
        assert service.stdout.readline() == "orphaned\n"
        _, errors = service.communicate(timeout=300)
    finally:
        service.kill()
        service.wait()
    assert (service.returncode, errors) == (status, "")


@pytest.mark.parametrize("number", [OWNER_DIED, TERM])
def test_a_process_ends_although_python_loses_its_exit(number: signal.Signals) -> None:
    process = python(LOSES_EXIT)
    try:
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGALRM
    assert output == "lost\n" and "Exception ignored" in errors


async def test_a_block_until_an_event_runs_to_its_end_without_it() -> None:
    event, done = asyncio.Event(), []
    async with until_set(event):
        await asyncio.sleep(0)
        done.append(1)
    event.set()
    await asyncio.sleep(0)
    assert done == [1]


@pytest.mark.parametrize("before", [True, False])
async def test_a_block_is_left_when_its_event_is_set(before: bool) -> None:
    event, tidied = asyncio.Event(), []
    if before:
        event.set()
    else:
        asyncio.get_running_loop().call_soon(event.set)
    async with asyncio.timeout(300), until_set(event):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append(1)
    assert tidied == [1]
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_block_has_its_grace_after_the_event() -> None:
    event, done = asyncio.Event(), []
    event.set()
    async with until_set(event, grace=300):
        for _ in range(4):
            await asyncio.sleep(0)
        done.append(1)
    assert done == [1]
    async with asyncio.timeout(300), until_set(event, grace=0.01):
        await asyncio.Event().wait()


async def test_an_event_that_is_set_as_its_block_ends_changes_nothing() -> None:
    event, errors = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    for turns in range(4):  # of the event loop, between the event and the end of the block
        event.clear()
        async with until_set(event):
            await asyncio.sleep(0)
            event.set()
            for _ in range(turns):
                await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
    assert errors == []


async def test_an_error_of_the_cleanup_passes_although_the_event_is_set() -> None:
    event = asyncio.Event()
    event.set()
    with pytest.raises(TimeoutError, match="its own"):
        async with until_set(event):
            try:
                await asyncio.Event().wait()
            finally:
                raise TimeoutError("its own")


async def test_a_blocks_own_errors_and_cancellations_pass() -> None:
    event = asyncio.Event()
    with pytest.raises(TimeoutError, match="its own"):
        async with until_set(event):
            raise TimeoutError("its own")

    async def waits() -> None:
        async with until_set(event):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_reap_still_leaves_no_zombie() -> None:
    child = Child.spawn("long", [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    reaping = asyncio.create_task(child.reap())
    await asyncio.sleep(0)
    reaping.cancel()
    await asyncio.sleep(0)
    child.kill()
    with pytest.raises(asyncio.CancelledError):
        await reaping
    assert not psutil.pid_exists(child.pid)


FORKS = """
import subprocess
import polyreme
import grpc
from concurrent.futures import ThreadPoolExecutor

server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
grpc.channel_ready_future(channel).result(60)
print(sum(subprocess.run(["/bin/true"], preexec_fn=int).returncode != 0 for _ in range(300)))
channel.close()
server.stop(0)
"""


def test_a_process_that_speaks_grpc_starts_children_that_live() -> None:
    """Without our settings, gRPC's fork handlers abort about 3 of 100 children before exec."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=clean, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0\n", "")
