"""Which checkpoints are kept, on files alone."""

import json
from pathlib import Path

import pytest
import xxhash

from polyreme_trainer.megatron.checkpoint import find, newest, prune


def saved(root: Path, *iterations: int) -> None:
    """Checkpoints as `save` leaves them, of one small file."""
    for iteration in iterations:
        folder = root / f"iteration-{iteration:06d}"
        folder.mkdir(parents=True)
        (folder / "state-0.pt").write_bytes(b"weights")
        files = {"state-0.pt": xxhash.xxh3_64(b"weights").hexdigest()}
        (folder / "checkpoint.json").write_text(json.dumps({"iteration": iteration, "facts": {}, "files": files}))


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
    """As by a learner that was taken over and does not know it yet."""
    saved(tmp_path, 150, 160, 170)
    prune(tmp_path, 160, 1)
    assert iterations(tmp_path) == [160, 170]
