"""Arenas whose owner is another process leave nothing in shared memory."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme.weights.arena import SHARED_MEMORY, Arena, remove_stale


@pytest.fixture
def run_id() -> Iterator[str]:
    run = f"test-{uuid.uuid4().hex[:12]}"
    yield run
    assert not list(SHARED_MEMORY.glob(f"polyreme-{run}-*"))


@pytest.fixture
def arena(run_id: str) -> Iterator[Arena]:
    arena = Arena.create(run_id, 5000)
    yield arena
    arena.close()


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_several_processes_write_slices_of_one_slot(arena: Arena) -> None:
    code = """if True:
        import sys
        from polyreme.weights.arena import Arena
        arena, rank = Arena.open(sys.argv[1], writable=True), int(sys.argv[2])
        arena.slot_view(1)[rank::4] = bytes([rank + 1]) * 1250
    """
    arena.begin(1)
    ranks = [python(code, arena.path, rank) for rank in range(4)]
    assert [rank.wait(300) for rank in ranks] == [0, 0, 0, 0]
    for rank in ranks:
        rank.communicate()
    arena.complete(1, version=1, term=1)
    assert bytes(arena.slot_view(1)) == bytes([1, 2, 3, 4]) * 1250
    assert arena.path.exists()  # the end of a rank that does not own it removes nothing


def test_exit_removes_the_arena(run_id: str) -> None:
    owner = python(
        "import sys; from polyreme.weights.arena import Arena; a = Arena.create(sys.argv[1], 100); print(a.path)", run_id
    )
    output, _ = owner.communicate(timeout=300)
    assert owner.returncode == 0
    assert not Path(output.strip()).exists()


def test_a_killed_owners_arena_is_removed_by_the_next(run_id: str) -> None:
    code = """if True:
        import sys
        from polyreme.weights.arena import Arena
        kept = [Arena.create(sys.argv[1], 100, part=part) for part in (0, 1)]
        print(kept[0].path, flush=True)
        sys.stdin.read()
    """
    owner = python(code, run_id)
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert remove_stale(run_id) == []
    assert path.exists()
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate(timeout=300)
    assert path.exists()
    arena = Arena.create(run_id, 200)
    assert [p.name for p in SHARED_MEMORY.glob(f"polyreme-{run_id}-*")] == [path.name]
    arena.close()


def test_a_child_of_the_owner_removes_nothing(run_id: str) -> None:
    code = """if True:
        import os, sys
        from polyreme.weights.arena import Arena
        arena = Arena.create(sys.argv[1], 100)
        if os.fork() == 0:
            sys.exit(0)  # runs the exit handlers
        os.wait()
        print(arena.path.exists())
    """
    owner = python(code, run_id)
    output, _ = owner.communicate(timeout=300)
    assert output == "True\n"
