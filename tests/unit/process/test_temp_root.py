"""Temporary files are where the names of unix sockets fit."""

import tempfile
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme.process.temp_root import ADDRESS_BYTES, temp_root


def test_tmpdir_is_used_where_it_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "with spaces and \u00e9").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    room = ADDRESS_BYTES - len(str(folder).encode()) - 1
    assert temp_root(room) == folder
    assert temp_root(room + 1) == Path("/tmp")


def test_a_tmpdir_that_others_removed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert temp_root(40) == Path("/tmp")


def test_nothing_that_fits_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        temp_root(ADDRESS_BYTES, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert "/tmp" in caught.value.found and "TMPDIR" in caught.value.do
