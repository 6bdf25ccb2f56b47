"""Slots between processes, the generation word, and nothing left in shared memory."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyreme.errors import ConfigError
from polyreme.weights import arena as arena_module
from polyreme.weights.arena import SHARED_MEMORY, Arena, ArenaError, remove_stale


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


def test_a_reader_sees_what_was_written(arena: Arena) -> None:
    for slot in range(arena.slots):
        arena.begin(slot)
        arena.slot_view(slot)[:] = bytes([slot + 1]) * 5000
        generation = arena.complete(slot, version=10 + slot, term=2)
        reader = Arena.open(arena.path)
        assert reader.nonce == arena.nonce
        assert (reader.slots, reader.slot_nbytes) == (3, 5000)
        assert reader.version(slot) == (2, 10 + slot)
        reader.check(slot, generation)
        reader.close()
    assert [bytes(arena.slot_view(slot)) for slot in range(3)] == [bytes([slot + 1]) * 5000 for slot in range(3)]


def test_the_generation_word_is_odd_while_writing_and_never_returns(arena: Arena) -> None:
    seen = [arena.generation(0)]
    for _ in range(3):
        arena.begin(0)
        seen.append(arena.generation(0))
        seen.append(arena.complete(0, version=1, term=1))
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    arena.begin(0)
    arena.begin(0)  # the first of these was never completed
    assert arena.generation(0) == 9
    with pytest.raises(ArenaError, match="overwritten"):
        arena.check(0, 9)
    with pytest.raises(ValueError, match="slot"):
        arena.complete(1, version=1, term=1)


def test_a_reader_may_not_write(arena: Arena) -> None:
    reader = Arena.open(arena.path)
    with pytest.raises(TypeError):
        reader.slot_view(0)[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.begin(0)
    reader.close()


def test_slots_that_do_not_exist_are_refused(arena: Arena) -> None:
    for slot in (-1, 3):
        with pytest.raises(ArenaError, match="below 3"):
            arena.slot_view(slot)


def test_a_slot_written_during_a_read_is_noticed(arena: Arena) -> None:
    """Every read with the same generation word before and after it has the bytes of only one version."""
    stop = threading.Event()

    def write() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            arena.begin(0)
            arena.slot_view(0)[:] = bytes([version % 251]) * 5000
            arena.complete(0, version=version, term=1)

    writer = threading.Thread(target=write)
    writer.start()
    reader = Arena.open(arena.path)
    whole = torn = 0
    try:
        while whole < 50 or (torn < 1 and whole < 20000):
            generation = reader.generation(0)
            if generation == 0 or generation % 2:
                continue
            first = bytes(reader.slot_view(0)[:2500])
            data = first + bytes(reader.slot_view(0)[2500:])
            try:
                reader.check(0, generation)
            except ArenaError:
                torn += 1
                continue
            whole += 1
            assert data == bytes([generation // 2 % 251]) * 5000
    finally:
        stop.set()
        writer.join()
        reader.close()


def test_views_outlive_the_arena(run_id: str) -> None:
    arena = Arena.create(run_id, 100)
    view = np.frombuffer(arena.slot_view(0), np.uint8)
    arena.close()
    arena.close()
    view[3] = 9
    assert view.sum() == 9


def test_a_dropped_arena_is_removed(run_id: str) -> None:
    path = Arena.create(run_id, 100).path
    assert not path.exists()


def test_killed_owners_of_any_run_are_cleared_up_after(run_id: str) -> None:
    stale, made, living = SHARED_MEMORY / f"polyreme-{run_id}-a-weights-0", SHARED_MEMORY / f"polyreme-{run_id}-b-weights-0", None
    try:
        living = Arena.create(f"{run_id}-c", 100)
        stale.write_bytes(bytes(100))
        made.touch()  # by a process that has not locked it yet
        assert stale in remove_stale()
        assert living.path.exists() and made.exists() and not stale.exists()
    finally:
        made.unlink(missing_ok=True)
        if living is not None:
            living.unlink()
            living.close()


def test_other_runs_are_left_alone(run_id: str) -> None:
    other = SHARED_MEMORY / f"polyreme-{run_id}-weights-9-weights-0"  # of the run "<run_id>-weights-9"
    other.touch()
    try:
        assert remove_stale(run_id) == []
        assert other.exists()
    finally:
        other.unlink()


def test_a_newer_arena_takes_the_name_and_the_older_one_leaves_it(run_id: str) -> None:
    older = Arena.create(run_id, 100)
    newer = Arena.create(run_id, 100)
    assert older.nonce != newer.nonce
    older.close()
    reader = Arena.open(newer.path)
    assert reader.nonce == newer.nonce
    reader.close()
    newer.close()


def test_an_invalid_arena_is_refused(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(ArenaError, match="No such file"):
        Arena.open(tmp_path / "none")
    (tmp_path / "other").write_bytes(bytes(10000))
    with pytest.raises(ArenaError, match="complete arena"):
        Arena.open(tmp_path / "other")
    (tmp_path / "link").symlink_to(arena.path)
    with pytest.raises(ArenaError, match="symbolic links"):
        Arena.open(tmp_path / "link")
    whole = bytearray(arena.path.read_bytes())
    (tmp_path / "short").write_bytes(whole[:-1])
    with pytest.raises(ArenaError, match="header"):
        Arena.open(tmp_path / "short")
    whole[8] = 99
    (tmp_path / "skewed").write_bytes(whole)
    with pytest.raises(ArenaError, match="found 99"):
        Arena.open(tmp_path / "skewed")


def test_too_little_shared_memory_is_an_error(run_id: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Arena.create(run_id, 1 << 50)
    assert "shm_size" in caught.value.do
    assert not (arena_module.SHARED_MEMORY / f"polyreme-{run_id}-weights-0").exists()
