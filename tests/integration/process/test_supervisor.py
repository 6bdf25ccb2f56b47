"""Supervision of real child processes: limited restarts, sets that end together, and whole process groups."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polyreme.errors import GateError, RunFailedError, StaleTermError
from polyreme.process.machine import _own_groups
from polyreme.process.supervisor import ChildFailedError, ProcessSet, ProcessSpec, Supervisor, last_error
from support.processes import command_line, runs
from support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(600)  # processes that supervision must end sleep for longer


def unit(
    folder: Path, *scripts: str, name: str = "work", serves: bool = False, kind: type[ProcessSet] = ProcessSet
) -> ProcessSet:
    """A set of one Python process per script; `note(text)` in a script appends a line to notes.txt."""
    # The file is closed in the open: an exception that a signal raises while a collected file closes itself is lost without a word.
    path = str(folder / "notes.txt")
    prelude = f"import os, signal, sys, time\ndef note(text):\n    with open({path!r}, 'a') as file: file.write(f'{{text}}\\n')\n"

    def programs() -> list[ProcessSpec]:
        return [
            ProcessSpec(f"{name}-{place}", (sys.executable, "-S", "-c", prelude + script)) for place, script in enumerate(scripts)
        ]

    return kind(name, programs, folder, serves)


def notes(folder: Path) -> list[str]:
    path = folder / "notes.txt"
    return path.read_text().splitlines() if path.exists() else []


async def test_a_dead_child_is_started_again_until_it_ends_well(tmp_path: Path) -> None:
    script = f"note('start'); sys.exit(0 if len(open({str(tmp_path / 'notes.txt')!r}).readlines()) == 3 else 1)"
    await Supervisor([unit(tmp_path, script)], max_restarts=5, first_backoff=0.01).run()
    assert notes(tmp_path) == ["start"] * 3


async def test_a_server_that_ends_unasked_is_started_again(tmp_path: Path) -> None:
    serve = "signal.signal(signal.SIGTERM, lambda *_: (note('drained'), sys.exit(0)))\nnote('up')\nwhile True: time.sleep(0.02)"
    supervisor = Supervisor([unit(tmp_path, serve, name=name, serves=True) for name in "ab"], max_restarts=1, first_backoff=0.01)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: notes(tmp_path) == ["up"] * 2)
    children = [child for child in psutil.Process().children() if str(tmp_path) in " ".join(command_line(child))]
    children[0].terminate()
    await until(lambda: notes(tmp_path).count("up") == 3)
    await supervisor.stop(grace=10)
    await task  # a requested end counts as success, and does not shorten another server's end
    assert notes(tmp_path).count("drained") == 3


async def test_restarts_before_a_long_good_time_are_forgotten(tmp_path: Path) -> None:
    script = f"note('start'); sys.exit(0 if len(open({str(tmp_path / 'notes.txt')!r}).readlines()) == 6 else 1)"
    await Supervisor([unit(tmp_path, script)], max_restarts=1, first_backoff=0.01, well_seconds=0.0).run()
    assert notes(tmp_path) == ["start"] * 6


@pytest.fixture
def small_group() -> Iterator[str]:
    """Code by which a process enters a control group with 64 MiB of memory."""
    if os.geteuid() or not (groups := _own_groups()) or not os.access(groups[0], os.W_OK):
        pytest.skip("this user cannot create a control group")
    folder = groups[0] / f"polyreme-test-{os.getpid()}"
    folder.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (folder / name).exists():
                (folder / name).write_text(str(64 << 20))
                break
        else:
            pytest.skip("its control groups have no limit of memory")
        yield f"open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    finally:
        folder.rmdir()


_SUPERVISED = """
import asyncio, os, sys
{enter}
from pathlib import Path
from polyreme.process.supervisor import ChildFailedError, ProcessSet, ProcessSpec, Supervisor
script = "import time\\nblock = bytearray(200 << 20)\\nfor at in range(0, len(block), 4096): block[at] = 1\\ntime.sleep(600)"
unit = ProcessSet("big", lambda: [ProcessSpec("big", (sys.executable, "-S", "-c", script))], Path(sys.argv[1]), True)
restarts = []
supervisor = Supervisor([unit], 10, first_backoff=0.01, on_restart=lambda name, found: restarts.append(found))
try:
    asyncio.run(supervisor.run())
except ChildFailedError as error:
    print(len(restarts), restarts[0], error, sep="\\n")
"""


def test_a_process_that_the_kernel_kills_for_memory_at_every_start_is_given_up(tmp_path: Path, small_group: str) -> None:
    argv = [sys.executable, "-c", _SUPERVISED.format(enter=small_group), str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    restarts, first, error = said.stdout.strip().split("\n")
    assert restarts == "2"
    assert first == "big was ended by SIGKILL (the kernel killed a process for memory: the limit is 64 MiB)"
    assert first in error and "as at the 2 starts before" in error and "Allow more memory" in error


async def test_an_end_for_memory_between_others_is_restarted(tmp_path: Path) -> None:
    lacks = iter(["", "lack", "lack", "", "lack", "lack", ""])

    class Lacking(ProcessSet):
        def lacked_memory(self) -> str:
            return next(lacks)

    script = f"note('start'); sys.exit(0 if len(open({str(tmp_path / 'notes.txt')!r}).readlines()) == 8 else 1)"
    await Supervisor([unit(tmp_path, script, kind=Lacking)], max_restarts=10, first_backoff=0.01).run()
    assert notes(tmp_path) == ["start"] * 8


async def test_each_unit_has_its_own_restarts(tmp_path: Path) -> None:
    dying = "note('start'); raise ValueError('of no use')"
    twice = f"note('twice'); sys.exit(0 if open({str(tmp_path / 'notes.txt')!r}).read().count('twice') > 2 else 1)"
    units = [unit(tmp_path, twice, name="a"), unit(tmp_path, dying, name="b")]
    with pytest.raises(ChildFailedError, match=r"b-0 .*3 restarts.*of no use"):
        await Supervisor(units, max_restarts=3, first_backoff=0.05).run()
    assert notes(tmp_path).count("start") == 4
    assert notes(tmp_path).count("twice") == 3


async def test_a_process_that_cannot_start_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    def programs() -> list[ProcessSpec]:
        started = ProcessSpec("there", (sys.executable, "-c", "import time; time.sleep(3600)", str(tmp_path)))
        return [started, ProcessSpec("missing", (str(tmp_path / "nothing"),))]

    with pytest.raises(RunFailedError, match=r"missing to start, .* No such file"):
        await Supervisor([ProcessSet("work", programs, tmp_path)], max_restarts=3).run()
    assert not [child for child in psutil.Process().children() if str(tmp_path) in command_line(child)]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
async def test_a_death_by_signal_is_reported(tmp_path: Path, number: int, name: str) -> None:
    with pytest.raises(ChildFailedError, match=f"work-0 was ended by {name}"):
        await Supervisor([unit(tmp_path, f"os.kill(os.getpid(), {number})")], max_restarts=0).run()


async def test_an_error_that_a_restart_would_meet_again_is_final(tmp_path: Path) -> None:
    script = f"note('start'); print('learner: error: the logits differ'); sys.exit({GateError.exit_code})"
    with pytest.raises(ChildFailedError, match="the logits differ") as caught:
        await Supervisor([unit(tmp_path, script)], max_restarts=5, first_backoff=0.01).run()
    assert notes(tmp_path) == ["start"]
    assert caught.value.child.name == "work-0"


async def test_a_silent_end_waits_for_the_process_that_has_the_reason(tmp_path: Path) -> None:
    """Rank 1 ends as soon as rank 0 fails, which may take a moment to say why."""
    code, pids = GateError.exit_code, tmp_path / "notes.txt"
    leader = (
        f"import pathlib\npath = pathlib.Path({str(pids)!r})\nwhile not path.exists(): time.sleep(0.02)\n"
        f"stat = pathlib.Path('/proc', path.read_text().strip(), 'stat')\n"
        "while stat.exists() and ') Z' not in stat.read_text(): time.sleep(0.02)\n"
        f"time.sleep(0.5)\nprint('learner: error: the disk is full')\nsys.exit({code})"
    )
    follower = f"note(os.getpid())\nsys.exit({code})"
    with pytest.raises(ChildFailedError, match="the disk is full") as caught:
        await Supervisor([unit(tmp_path, leader, follower)], max_restarts=5).run()
    assert caught.value.child.name == "work-0"


async def test_a_childs_error_message_is_forwarded_unchanged(tmp_path: Path) -> None:
    message = "expected 1 replica; found 0. Start one."
    script = f"print('child: error: {message}'); sys.exit({GateError.exit_code})"
    with pytest.raises(ChildFailedError) as caught:
        await Supervisor([unit(tmp_path, script)], max_restarts=5).run()
    assert str(caught.value) == message
    assert str(RunFailedError("the run to continue", str(caught.value), "Fix it.")) == message


async def test_a_child_whose_role_was_taken_over_ends_supervision_as_such(tmp_path: Path) -> None:
    with pytest.raises(StaleTermError):
        await Supervisor([unit(tmp_path, f"sys.exit({StaleTermError.exit_code})")], max_restarts=5).run()


async def test_one_dead_rank_restarts_all_ranks(tmp_path: Path) -> None:
    count = f"count = lambda: len(open({str(tmp_path / 'notes.txt')!r}).readlines())\n"
    first = count + "note('rank 0')\nwhile count() % 2: time.sleep(0.02)\nsys.exit(0 if count() == 4 else 1)"
    second = count + "note('rank 1')\nwhile count() < 4: time.sleep(0.02)"
    await Supervisor([unit(tmp_path, first, second)], max_restarts=1, first_backoff=0.01).run()
    assert sorted(notes(tmp_path)) == ["rank 0", "rank 0", "rank 1", "rank 1"]


async def test_nothing_is_left_of_a_group_when_its_leader_has_died(tmp_path: Path) -> None:
    script = (
        "child = os.fork()\n"
        "if child == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); note(os.getpid()); time.sleep(3600)\n"
        f"while not os.path.exists({str(tmp_path / 'notes.txt')!r}): time.sleep(0.01)\n"
        "os._exit(1)"
    )
    with pytest.raises(ChildFailedError):
        await Supervisor([unit(tmp_path, script)], max_restarts=0).run()
    await until(lambda: all(not runs(int(pid)) for pid in notes(tmp_path)))


async def test_cancelling_supervision_ends_its_children(tmp_path: Path) -> None:
    task = asyncio.create_task(Supervisor([unit(tmp_path, "note(os.getpid()); time.sleep(3600)")], max_restarts=1).run())
    await until(lambda: len(notes(tmp_path)) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not runs(int(notes(tmp_path)[0]))


async def test_stop_terminates_gently_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    listens = "signal.signal(signal.SIGTERM, lambda *_: (note('saved'), sys.exit(0))); note('up')\nwhile True: time.sleep(0.02)"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('up'); time.sleep(3600)"
    supervisor = Supervisor([unit(tmp_path, listens, name="a"), unit(tmp_path, deaf, name="b")], max_restarts=3)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: notes(tmp_path).count("up") == 2)
    await supervisor.stop(grace=3.0)  # the whole grace period, for the process that ignores signals
    with pytest.raises(ChildFailedError, match="b-0 was ended by SIGKILL"):
        await task
    assert "saved" in notes(tmp_path)


async def test_a_child_that_dies_while_draining_is_not_started_again(tmp_path: Path) -> None:
    supervisor = Supervisor([unit(tmp_path, "note('start'); time.sleep(0.2); sys.exit(1)")], max_restarts=3)
    supervisor.draining = True
    with pytest.raises(ChildFailedError):
        await supervisor.run()
    assert notes(tmp_path) == ["start"]


async def test_a_child_that_died_before_the_drain_is_not_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor([unit(tmp_path, "note('start'); sys.exit(1)")], max_restarts=3, first_backoff=2.0)
    task = asyncio.create_task(supervisor.run())
    await until(lambda: "restart 1 of 3" in caplog.text)
    await supervisor.stop(grace=0.1)
    with pytest.raises(ChildFailedError):
        await task
    assert notes(tmp_path) == ["start"]


async def test_logs_are_kept_over_restarts(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError):
        await Supervisor([unit(tmp_path, "print('once'); sys.exit(1)")], max_restarts=1, first_backoff=0.01).run()
    assert (tmp_path / "work-0.log").read_text().splitlines() == ["once", "once"]


def test_the_telling_line_of_a_log() -> None:
    assert last_error("polyreme: error: expected a; found b. Do c.\nbye\n") == "expected a; found b. Do c."
    assert (
        last_error("Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: no room\n")
        == "torch.OutOfMemoryError: no room"
    )
    elsewhere = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    cause = "(EngineCore pid=7) ValueError: VLLM_PORT appears to be a URI"
    assert last_error(f"Traceback ...\n{cause}\n(EngineCore pid=7) ...\n{elsewhere}\n") == cause
    assert last_error(f"{elsewhere}\n") == elsewhere
    assert last_error("Traceback ...\nValueError: \nInvalid log settings: x\nall, aot\n") == "ValueError: Invalid log settings: x"
    assert last_error("hello\n\n") == "hello"
    assert last_error("") == ""


def test_children_die_with_a_killed_owner(tmp_path: Path) -> None:
    owner = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom polyreme.process.supervisor import ProcessSpec, Supervisor, ProcessSet\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "argv = (sys.executable, '-c', f'import os, time; open({str(folder)!r} + \"/notes.txt\", \"a\").write(str(os.getpid()) + chr(10)); time.sleep(3600)')\n"
        "asyncio.run(Supervisor([ProcessSet('a', lambda: [ProcessSpec('a', argv)], folder)], 0).run())\n"
    )
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", owner])
    try:
        wait_until(lambda: len(notes(tmp_path)) == 1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_until(lambda: not runs(int(notes(tmp_path)[0])))
