"""Files that several processes write."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyreme.rundir.run_records import write_atomically


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As the parts of a service, which start together and write the same configuration. What is read is whole."""
    path = tmp_path / "config.yaml"

    def write(text: str) -> set[str]:
        read = set[str]()
        for _ in range(50):
            write_atomically(path, text)
            read.add(path.read_text())
        return read

    texts = [letter * 5000 for letter in "abc"]
    with ThreadPoolExecutor(len(texts)) as threads:
        assert set().union(*threads.map(write, texts)) <= set(texts)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomically(tmp_path / "taken", "x")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]
