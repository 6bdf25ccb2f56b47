"""The kept checkpoints, and the completeness of one, tested on files only."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
import xxhash

from polyreme.errors import ConfigError, UnavailableError
from polyreme.rundir import checkpoint_manifest
from polyreme.rundir.checkpoint_manifest import checkpoint_path, numbered, write_manifest
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.atomic import stage
from polyreme_trainer.megatron.checkpoints.checkpoint import (
    Checkpoint,
    RankContents,
    check_writable,
    complete,
    find,
    newest,
    prune,
    write,
)


def saved(root: Path, *iterations: int) -> None:
    """Writes checkpoints like `save`, with one small file each."""
    for iteration in iterations:
        folder = root / f"iteration-{iteration:06d}"
        folder.mkdir(parents=True)
        (folder / "state-0.pt").write_bytes(b"weights")
        files = {"state-0.pt": xxhash.xxh3_64(b"weights").hexdigest()}
        write_manifest(folder, iteration, {"tensor": 1}, {"term": iteration}, files)


def damage(root: Path, iteration: int) -> None:
    (root / f"iteration-{iteration:06d}" / "state-0.pt").write_bytes(b"weight5")


def iterations(root: Path) -> list[int]:
    return [checkpoint.iteration for checkpoint in find(root)]


@pytest.mark.parametrize(("keep", "kept"), [(1, [160]), (2, [150, 160]), (9, [140, 150, 160])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    saved(tmp_path, 140, 150, 160)
    prune(tmp_path, 160, keep)
    assert iterations(tmp_path) == kept


@pytest.mark.parametrize(("keep", "kept"), [(1, [160]), (2, [150, 160])])
def test_damaged_ones_that_a_resume_has_passed_over_take_nobodys_place(tmp_path: Path, keep: int, kept: list[int]) -> None:
    saved(tmp_path, 140, 150, 190, 200)
    damage(tmp_path, 190)
    damage(tmp_path, 200)
    resumed = newest(tmp_path)
    assert resumed is not None and resumed.iteration == 150
    saved(tmp_path, 160)
    prune(tmp_path, 160, keep)
    assert iterations(tmp_path) == kept


def test_what_is_not_damaged_is_not_removed_by_a_save_of_before_it(tmp_path: Path) -> None:
    """The save is by a replaced learner that does not know it yet."""
    saved(tmp_path, 150, 160, 170)
    prune(tmp_path, 160, 1)
    assert iterations(tmp_path) == [160, 170]


def test_any_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    """The older checkpoint is found instead, and the next save removes the damaged one."""
    saved(tmp_path, 140, 150)
    manifest = tmp_path / "iteration-000150" / "checkpoint.json"
    whole = manifest.read_bytes()
    for position in range(len(whole)):
        manifest.write_bytes(whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :])
        found = newest(tmp_path)
        assert found is not None
        assert found.iteration == 140, f"byte {position} of the manifest is not covered"
    saved(tmp_path, 160)
    prune(tmp_path, 160, 2)
    assert iterations(tmp_path) == [140, 160]
    assert not manifest.parent.exists()


def test_what_has_no_name_of_a_checkpoint_is_not_touched(tmp_path: Path) -> None:
    """A user's copies and notes, and checkpoints that a user has renamed."""
    saved(tmp_path, 140, 150)
    for name in ("iteration-000150-copy", "iteration-best", "iteration-150", "iteration-0000150", "iteration-\u0661\u0665\u0660"):
        shutil.copytree(tmp_path / "iteration-000150", tmp_path / name)
    (tmp_path / "iteration-000170").write_text("a note")
    (tmp_path / "iteration-000180").symlink_to(tmp_path / "nowhere")
    foreign = {path.name for path in tmp_path.iterdir()} - {"iteration-000140", "iteration-000150"}
    found = newest(tmp_path)
    assert found is not None and found.path.name == "iteration-000150"
    saved(tmp_path, 160)
    prune(tmp_path, 160, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"iteration-000160", *foreign}


def test_a_folder_in_which_nothing_can_be_saved_is_an_error_before_the_first_save(tmp_path: Path) -> None:
    ranks, root = Ranks(), tmp_path / "checkpoints"
    check_writable(root, ranks)
    assert list(root.iterdir()) == []
    root.rmdir()
    root.touch()
    with pytest.raises(ConfigError) as error:
        check_writable(root, ranks)
    assert str(root) in error.value.expected
    ranks.close()


def test_a_file_with_the_name_of_a_checkpoint_makes_way_for_it(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7)
    path.write_text("a note")
    temporary = stage(path)
    write(temporary, contents(0, 1))
    complete(temporary, path, contents(0, 1), {}, 0.0)
    assert iterations(tmp_path) == [7] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[" * 100_000, b"null", b"{}", b"\xff\xfe", b'{"format": 1}', b'{"format": 2, "digest": 7}']
)
def test_a_manifest_that_is_none_is_a_damaged_checkpoint(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, 140)
    (tmp_path / "iteration-000140" / "checkpoint.json").write_bytes(content)
    assert newest(tmp_path) is None
    assert len(numbered(tmp_path)) == 1
    prune(tmp_path, 130, 1)
    assert len(numbered(tmp_path)) == 0


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not count as damage, since a resume would silently use an older checkpoint, and a save would remove the newer one."""
    saved(tmp_path, 140)
    with monkeypatch.context() as other:
        other.setattr(checkpoint_manifest, "_FORMAT", 4)
        saved(tmp_path, 150)
    for use in (lambda: newest(tmp_path), lambda: prune(tmp_path, 160, 1)):
        with pytest.raises(ConfigError) as refused:
            use()
        assert "format 4" in refused.value.found
    assert len(numbered(tmp_path)) == 2


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_file_that_is_missing_or_unreadable_is_damage(tmp_path: Path, unreadable: bool) -> None:
    saved(tmp_path, 140, 150)
    file = tmp_path / "iteration-000150" / "state-0.pt"
    file.unlink()
    if unreadable:
        file.mkdir()  # reading it fails, as on a bad disk
    found = newest(tmp_path)
    assert isinstance(found, Checkpoint)
    assert (found.iteration, found.facts) == (140, {"term": 140})


def contents(rank: int, ranks: int) -> RankContents:
    return RankContents({f"state-{rank}.pt": {"actor": torch.full((4,), float(rank))}}, {"tensor": ranks}, rank, ranks)


def test_a_checkpoint_appears_when_the_last_rank_has_written(tmp_path: Path) -> None:
    """In any order of the ranks."""
    path = checkpoint_path(tmp_path, 7)
    temporary = stage(path)
    first, second = (contents(rank, 2) for rank in range(2))
    write(temporary, first)
    completing = threading.Thread(target=complete, args=(temporary, path, first, {"term": 3}, 60.0))
    completing.start()
    assert newest(tmp_path) is None and not path.exists()
    write(temporary, second)
    completing.join(60.0)
    found = newest(tmp_path)
    assert found is not None
    assert (found.iteration, found.facts, found.layout) == (7, {"term": 3}, {"tensor": 2})
    assert sorted(file.name for file in path.iterdir()) == ["checkpoint.json", "state-0.pt", "state-1.pt"]
    assert list(found.files) == ["state-0.pt", "state-1.pt"]


def test_a_rank_that_does_not_write_is_named_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 6)
    path = checkpoint_path(tmp_path, 7)
    temporary = stage(path)
    write(temporary, contents(0, 2))
    with pytest.raises(UnavailableError) as error:
        complete(temporary, path, contents(0, 2), {}, 0.0)
    assert "rank 1" in error.value.expected
    found = newest(tmp_path)
    assert found is not None and found.iteration == 6


def test_a_checkpoint_whose_directory_is_removed_is_not_waited_for(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7)
    temporary = stage(path)
    write(temporary, contents(0, 2))
    shutil.rmtree(temporary)
    with pytest.raises(FileNotFoundError):
        complete(temporary, path, contents(0, 2), {}, 3600.0)
