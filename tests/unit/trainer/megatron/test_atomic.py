"""Directories appear complete or not at all."""

from pathlib import Path

import pytest

from polyreme_trainer.megatron.atomic import new_directory


def test_a_directory_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in ("old", "new"):
        with new_directory(target) as temporary:
            (temporary / "file").write_text(content)
            assert not target.exists() or (target / "file").read_text() == "old"
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with new_directory(target) as temporary:
        (temporary / "file").write_text("old")
    with pytest.raises(OSError, match="full"), new_directory(target) as temporary:
        (temporary / "file").write_text("half")
        raise OSError("disk full")
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
