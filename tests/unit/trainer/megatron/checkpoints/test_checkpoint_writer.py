"""Saves in the background on files only: failures, deadlines, other writers and what a kill leaves. tests/integration has real roles."""

import errno
import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyreme.errors import PolyremeError, RunFailedError, UnavailableError
from polyreme.process.supervisor import FINAL_CODES
from polyreme.rundir.checkpoint_manifest import checkpoint_path
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import LeaderError, Ranks
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.checkpoints.checkpoint import RankContents, find, newest
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
from polyreme_trainer.megatron.huggingface.export import Export

GENEROUS = 60.0
WEIGHTS = torch.arange(4096.0)
ROLE: Any = SimpleNamespace(model=SimpleNamespace(device=SimpleNamespace(synchronize=lambda: None)))
"""All that a save needs of a role, beside the contents."""


@pytest.fixture(autouse=True)
def contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of every save is WEIGHTS, on one rank."""
    monkeypatch.setattr(checkpoint, "rank_contents", lambda _: RankContents({"state-0.pt": {"model": WEIGHTS}}, {}, 0, 1))


@pytest.fixture
def writer(ranks: Ranks) -> CheckpointWriter:
    return CheckpointWriter(ranks)


def order(root: Path, number: int, prefix: str = "iteration", facts: Callable[[], Mapping[str, Any]] = dict, **more: Any) -> Save:
    return Save(checkpoint_path(root, number, prefix), [ROLE], facts, keep=2, **more)


def save(writer: CheckpointWriter, root: Path, *numbers: int, prefix: str = "iteration") -> Saved:
    for number in numbers:
        writer.start(order(root, number, prefix))
        saved = writer.finish(wait=True)
    assert saved is not None
    return saved


def numbers(root: Path, prefix: str = "iteration") -> list[int]:
    return [each.iteration for each in find(root, prefix) if each.intact()]


def unfinished(root: Path) -> list[Path]:
    return list(root.glob(".*"))


def test_a_save_counts_when_it_is_complete_and_not_before(writer: CheckpointWriter, tmp_path: Path) -> None:
    may_end = threading.Event()

    def facts() -> dict[str, Any]:
        assert may_end.wait(GENEROUS)
        return {"step": 3}

    writer.start(order(tmp_path, 3, "step", facts))
    assert writer.finish(wait=False) is None and numbers(tmp_path, "step") == []
    may_end.set()
    saved = writer.finish(wait=True)
    assert saved is not None
    assert (saved.number, saved.path, saved.hf_path, saved.oldest) == (3, checkpoint_path(tmp_path, 3, "step"), None, 3)
    found = newest(tmp_path, "step")
    assert found is not None and found.facts == {"step": 3}
    assert writer.finish(wait=True) is None


def test_the_state_is_that_of_the_start(writer: CheckpointWriter, tmp_path: Path) -> None:
    may_write = threading.Event()
    weights = torch.zeros(8)
    checkpoint_contents = RankContents({"state-0.pt": weights}, {}, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "rank_contents", lambda _: checkpoint_contents)
        write = checkpoint.write
        patch.setattr(checkpoint, "write", lambda *args: (may_write.wait(GENEROUS), write(*args)))
        writer.start(order(tmp_path, 1))
        weights += 1
        may_write.set()
        saved = writer.finish(wait=True)
    assert saved is not None
    assert torch.load(saved.path / "state-0.pt", weights_only=True).tolist() == [0.0] * 8


def test_each_kind_keeps_its_own_newest(writer: CheckpointWriter, tmp_path: Path) -> None:
    save(writer, tmp_path, 5, prefix="warm-start")
    assert save(writer, tmp_path, 1, 2, 3).oldest == 2
    assert (numbers(tmp_path), numbers(tmp_path, "warm-start")) == ([2, 3], [5])


def test_a_full_disk_ends_the_run_and_says_what_is_needed(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would train to the same save again. The older checkpoint stays, what was written goes, and the next save works."""
    root, exports = tmp_path / "checkpoints", {"": Export({"weight": torch.zeros(1 << 21)}, {"config.json": b"{}"})}
    save(writer, root, 4)
    stage = atomic.stage

    def on_a_full_disk(path: Path) -> Path:
        if path.name == "iteration-000008":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        temporary = stage(path)
        if path.parent == root:
            (temporary / "state-0.pt").symlink_to("/dev/full")
        return temporary

    with monkeypatch.context() as full:
        full.setattr(atomic, "stage", on_a_full_disk)
        writer.start(order(root, 6, hf_path=tmp_path / "hf" / "iteration-000006", exports=exports))
        with pytest.raises(RunFailedError) as error:
            writer.finish(wait=True)
        writer = CheckpointWriter(writer._ranks)
        with pytest.raises(RunFailedError, match="iteration-000008"):
            writer.start(order(root, 8))
    assert error.value.exit_code in FINAL_CODES
    assert "0.00783 GiB of iteration-000006" in error.value.expected and str(root) in error.value.expected
    assert " GiB free" in error.value.found and "state-0.pt" in error.value.found
    assert numbers(root) == [4] and unfinished(root) == [] and list((tmp_path / "hf").iterdir()) == []
    save(writer, root, 8)
    assert numbers(root) == [4, 8]


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a file that another process has open keeps its directory. The next save removes it."""

    def in_use(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", in_use)
        assert save(writer, tmp_path, 2, 4, 6).oldest == 2
    assert "iteration-000002" in caplog.text and os.strerror(errno.ENOTEMPTY) in caplog.text
    assert save(writer, tmp_path, 8).oldest == 6 and numbers(tmp_path) == [6, 8]


def test_an_export_that_fails_leaves_no_checkpoint_without_one(writer: CheckpointWriter, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(writer, root, 4)
    (tmp_path / "hf").touch()
    exports = {"": Export({"weight": WEIGHTS}, {"config.json": b"{}"})}
    writer.start(order(root, 6, hf_path=tmp_path / "hf" / "iteration-000006", exports=exports))
    with pytest.raises(OSError, match="hf"):
        writer.finish(wait=True)
    assert numbers(root) == [4] and unfinished(root) == []


def test_a_save_beyond_its_deadline_is_an_error_by_name(ranks: Ranks, tmp_path: Path) -> None:
    writer = CheckpointWriter(ranks, write_seconds=0.0, poll_seconds=0.01)
    may_end = threading.Event()

    def facts() -> dict[str, Any]:
        may_end.wait(GENEROUS)
        return {}

    writer.start(order(tmp_path, 6, "step", facts))
    with pytest.raises(UnavailableError) as error:
        writer.finish(wait=True)
    assert "step-000006" in error.value.expected
    may_end.set()
    writer.close()


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_removed(writer: CheckpointWriter, tmp_path: Path) -> None:
    save(writer, tmp_path, 2, 4)
    for number in (6, 8):  # torn at different moments
        torn = atomic.stage(checkpoint_path(tmp_path, number))
        checkpoint.write(torn, RankContents({"state-0.pt": WEIGHTS}, {}, 0, 2))
        (torn / "state-0.pt").write_bytes((torn / "state-0.pt").read_bytes()[: 1000 * number])
    assert numbers(tmp_path) == [2, 4] and len(unfinished(tmp_path)) == 2
    save(writer, tmp_path, 5)
    assert numbers(tmp_path) == [4, 5] and unfinished(tmp_path) == []


def test_two_processes_that_save_the_same_step_never_mix_their_files(ranks: Ranks, tmp_path: Path) -> None:
    """The later one wins. The earlier one fails with an error that says why, and its partial files are gone."""
    earlier, later, may_end = CheckpointWriter(ranks), CheckpointWriter(ranks), threading.Event()

    def facts() -> dict[str, Any]:
        assert may_end.wait(GENEROUS)
        return {"writer": "earlier"}

    earlier.start(order(tmp_path, 6, facts=facts))
    later.start(order(tmp_path, 6, facts=lambda: {"writer": "later"}))
    assert later.finish(wait=True) is not None
    may_end.set()
    with pytest.raises(PolyremeError) as error:
        earlier.finish(wait=True)
    assert "another process" in error.value.found
    found = newest(tmp_path)
    assert found is not None and found.facts == {"writer": "later"}
    assert unfinished(tmp_path) == []


def test_a_directory_that_cannot_be_created_is_an_error_at_the_start(writer: CheckpointWriter, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.touch()
    with pytest.raises(FileExistsError):
        writer.start(order(root, 2))
    root.unlink()
    save(writer, root, 2)
    assert numbers(root) == [2]


def test_a_failed_save_is_logged_when_something_else_ends_the_learner(
    writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def facts() -> dict[str, Any]:
        raise OSError(errno.EIO, "Input/output error")

    writer.start(order(tmp_path, 2, facts=facts))
    writer.close()
    assert "iteration-000002" in caplog.text and "Input/output error" in caplog.text


class Pipe:
    """A channel to one other rank in the same process."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[int, bytes]] = queue.Queue()

    def send(self, kind: int, payload: bytes) -> None:
        self._messages.put((kind, payload))

    def receive(self) -> tuple[int, bytes]:
        return self._messages.get(timeout=GENEROUS)


def test_a_rank_with_a_full_disk_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, pipe, raised = atomic.stage, Pipe(), list[PolyremeError]()

    def with_a_full_disk_for_rank_1(path: Path) -> Path:
        temporary = stage(path)
        (temporary / "state-1.pt").symlink_to("/dev/full")
        return temporary

    def save_on(rank: int) -> None:
        ranks = Ranks(rank, pipe)
        writer = CheckpointWriter(ranks)
        role: Any = SimpleNamespace(model=ROLE.model, rank=rank)
        try:
            writer.start(Save(checkpoint_path(tmp_path, 6), [role], dict, keep=2))
            writer.finish(wait=True)
        except PolyremeError as error:
            raised.append(error)
        ranks.close()

    monkeypatch.setattr(atomic, "stage", with_a_full_disk_for_rank_1)
    monkeypatch.setattr(
        checkpoint, "rank_contents", lambda roles: RankContents({f"state-{roles[0].rank}.pt": WEIGHTS}, {}, roles[0].rank, 2)
    )
    other = threading.Thread(target=save_on, args=(1,))
    other.start()
    save_on(0)
    other.join(GENEROUS)
    assert {type(error) for error in raised} == {RunFailedError, LeaderError}
    assert {error.exit_code for error in raised} == {RunFailedError.exit_code}
    assert all("rank 1" in str(error) and "No space left" in str(error) for error in raised)
    assert numbers(tmp_path) == [] and unfinished(tmp_path) == []
