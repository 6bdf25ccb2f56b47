"""The runs that a page shows, kept up to date while requests arrive.

Invariant: files are read only while requests arrive, in the page's own threads, so the page costs the trainer nothing while no
browser shows it. A directory that cannot be read causes one warning; the others are kept up to date.
"""

import asyncio
import logging
import os
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from polyreme.errors import ConfigError, PolyremeError
from polyreme.page.threads import PageThreads, TooBusyError
from polyreme.rundir.reader import RunReader, run_directories

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
_WATCHED_SECONDS = 30.0
"""Seconds after the last request for which files are still read."""


class Runs:
    """The runs at `paths`, each a run directory or a directory of run directories. They may appear later.

    Attributes:
        indexed: names of the runs whose files were read completely at least once.
        threads: the threads that read the runs.
    """

    def __init__(self, paths: Sequence[Path], threads: PageThreads | None = None) -> None:
        self._paths, self.indexed, self.threads = paths, set[str](), threads or PageThreads()
        self._readers: dict[str, RunReader] = {}
        self._warned: dict[Path, str] = {}
        self._find()
        self._asked = float("-inf")

    @property
    def readers(self) -> dict[str, RunReader]:
        """The readers by the names of their runs. Reading it counts as a request."""
        self._asked = time.monotonic()
        return dict(self._readers)

    def reader(self, name: str) -> RunReader | None:
        """The reader of a run; None for an unknown name."""
        return self.readers.get(name)

    async def keep_current(self) -> None:
        """Keeps the readers up to date. Never returns."""
        try:
            while True:
                if time.monotonic() - self._asked < _WATCHED_SECONDS:
                    with suppress(TooBusyError):
                        await self.threads.run(self.refresh)
                await asyncio.sleep(REFRESH_SECONDS)
        except Exception:
            logger.exception("the page will not show new data")
            raise
        finally:
            self.threads.close()

    def refresh(self) -> None:
        """Reads new data of the runs, and finds new runs. A run that was deleted is left out."""
        self._readers = {name: each for name, each in self._readers.items() if os.path.exists(each.run_dir / "run.json")}
        self._find()
        for name, reader in self._readers.items():
            with self._checked(reader.run_dir):
                reader.refresh()
                self.indexed.add(name)

    def _find(self) -> None:
        known = {reader.run_dir for reader in self._readers.values()}
        for path in self._paths:
            with suppress(ConfigError):  # a run that has not started
                for folder in run_directories(path, self._warn):
                    if folder not in known:
                        known.add(folder)
                        with self._checked(folder):
                            reader = RunReader(folder)
                            self._readers[_unused(reader.name, self._readers)] = reader

    @contextmanager
    def _checked(self, folder: Path) -> Iterator[None]:
        """Reads one run's directory. An error in one run must not affect the page of the others, or a trainer."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 a record of a later release may raise anything
            self._warn(folder, error)
        else:
            self._warned.pop(folder, None)

    def _warn(self, folder: Path, error: Exception) -> None:
        """Logs an error unless it is the directory's newest one."""
        if self._warned.get(folder) != repr(error):
            self._warned[folder] = repr(error)
            known = isinstance(error, PolyremeError | OSError | ValueError)
            logger.warning("cannot read the run in %s: %s", folder, error, exc_info=None if known else error)


def _unused(name: str, taken: Container[str]) -> str:
    """`name`, or `name-2`, `name-3` ... when runs of several directories share it."""
    return next(each for each in chain([name], (f"{name}-{number}" for number in count(2))) if each not in taken)
