"""The runs of a page, which are kept up to date."""

import asyncio
import logging
from pathlib import Path

import pytest

from polyreme.page.runs import REFRESH_SECONDS, Runs
from polyreme.process.tasks import running
from polyreme.rundir.reader import RunReader, run_directories
from support.seeded_run import record_run
from support.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs `first` and `second`."""
    for seed, name in enumerate(("first", "second")):
        record_run(tmp_path / name, iterations=1, seed=seed)
    return tmp_path


def link_run_file(folder: Path, target: str) -> None:
    """Replaces the folder's run.json by a link. File modes would make nothing unreadable, since the tests may run as root."""
    (folder / "run.json").unlink()
    (folder / "run.json").symlink_to(target)


def test_a_folder_that_cannot_be_read_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    link_run_file(folder / "first", "run.json")  # to itself
    assert run_directories(folder) == [folder / "second"]
    assert "first" in caplog.text and "symbolic links" in caplog.text
    caplog.clear()
    runs = Runs([folder])
    for _ in range(3):
        runs.refresh()
    assert runs.indexed == {"second"}
    assert caplog.text.count("symbolic links") == 1


def test_a_run_that_is_deleted_meanwhile_is_none(folder: Path) -> None:
    link_run_file(folder / "first", "nowhere")
    assert run_directories(folder) == [folder / "second"]


def test_an_error_in_one_run_leaves_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refresh = RunReader.refresh
    fails = True

    def failing(reader: RunReader) -> bool:
        if fails and reader.name == "first":
            raise KeyError("iteration")
        return refresh(reader)

    monkeypatch.setattr(RunReader, "refresh", failing)
    runs = Runs([folder])
    for _ in range(3):
        runs.refresh()
    assert runs.indexed == {"second"}
    assert [record.exc_info is not None for record in caplog.records] == [True]
    fails = False
    runs.refresh()
    assert runs.indexed == {"first", "second"}


async def test_the_end_of_following_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    runs = Runs([folder])
    monkeypatch.setattr(runs, "refresh", fail)
    assert runs.reader("first") is not None  # a request
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(runs.keep_current(), 60)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_nothing_is_read_until_somebody_looks(folder: Path) -> None:
    runs = Runs([folder])
    async with running(runs.keep_current()):
        await asyncio.sleep(1.5 * REFRESH_SECONDS)
        assert runs.indexed == set()
        assert runs.reader("second") is not None
        await until(lambda: runs.indexed == {"first", "second"})
