"""Temporary files are where the names of unix sockets fit."""

from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme.process.temp_root import ADDRESS_BYTES, temp_root


def test_tmpdir_is_used_where_it_is_short_enough(tmp_path: Path) -> None:
    (folder := tmp_path / "with spaces and \u00e9").mkdir()
    environ = {"TMPDIR": str(folder)}
    room = ADDRESS_BYTES - len(str(folder).encode()) - 1
    assert temp_root(room, environ) == folder
    assert temp_root(room + 1, environ) == Path("/tmp")


def test_a_tmpdir_that_others_removed_is_replaced(tmp_path: Path) -> None:
    assert temp_root(40, {"TMPDIR": str(tmp_path / "gone")}) == Path("/tmp")


def test_nothing_that_fits_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        temp_root(ADDRESS_BYTES, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert "/tmp" in caught.value.found and "TMPDIR" in caught.value.do
