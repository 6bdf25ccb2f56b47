"""A reader of one run directory.

Invariant: every answer comes from the run's own files or from their index. Only `refresh` reads new lines, so answers between two
refreshes are consistent.
"""

import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from polyreme.errors import ConfigError
from polyreme.experience.metric_records import Line
from polyreme.experience.run import ENDED
from polyreme.rundir.reader import samples
from polyreme.rundir.reader.index import Index, read_meta
from polyreme.rundir.reader.samples import Sample, SampleQuery
from polyreme.rundir.reader.series import AXES, Series, downsample, last_of_each, positions
from polyreme.rundir.run_directory import (
    Origin,
    Settings,
    changed_settings,
    make_folder,
    no_run,
    read_run_file,
    read_settings,
    unused,
)
from polyreme.rundir.run_records import read_summary
from polyreme.terminal.progress_bar import bar

INDEX = "index.sqlite"
VOCABULARY = "vocabulary.json"
LAST_STEP = 2**62
_METRICS = "SELECT name, NOT EXISTS (SELECT 1 FROM point WHERE metric = id AND value <> 0) AS zero FROM metric ORDER BY name"
_NEWEST = (
    "SELECT name, value FROM metric JOIN point ON metric = id AND step = (SELECT max(step) FROM point WHERE metric = id)"
    " ORDER BY name"
)


@dataclass(frozen=True)
class Contents:
    """A summary of an index's content.

    Attributes:
        iterations: the newest recorded iteration, or step of a stage; 0 before the first.
        samples: the number of samples and of answers in evaluations.
        metrics: the names of the metrics, sorted.
        zeros: those whose values are all 0.
    """

    iterations: int
    samples: int
    metrics: tuple[str, ...]
    zeros: tuple[str, ...]


class RunReader:
    """Reads one run directory, of a run or a stage, live or ended.

    Args:
        run_dir: a directory with a `run.json`.

    Attributes:
        run_dir: its path. `name` is the last part.
        run_id: id of the directory's run.
        origin: where it comes from if it is a fork.

    Raises:
        ConfigError: there is no run in the directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.name = run_dir, run_dir.resolve().name
        self.origin: Origin | None = None
        self.run_id = self._read_run_id()
        self._config: tuple[int, Settings] | None = None  # cached with the file's time, since parsing is slow
        self._changed: tuple[dict[str, object], list[str] | None] | None = None  # cached with the settings
        self._newest: tuple[object, dict[str, float]] | None = None  # as are these
        self._contents: tuple[object, Contents] | None = None  # cached with `Index.updated`, since pages poll often

    @cached_property
    def _index(self) -> Index:
        return Index(self.run_dir, _index_path(self.run_dir))

    def _read_run_id(self) -> str:
        found = read_run_file(self.run_dir)
        if found is None:
            raise no_run(self.run_dir)
        self.origin = found.forked_from
        return found.run_id

    def refresh(self) -> bool:
        """Reads new lines of the run's files. Returns whether there were any."""
        self.run_id = self._read_run_id()
        return self._index.update(self.run_id)

    def catch_up(self) -> None:
        """As `refresh`, with a progress bar, since the first read of a long run takes a while."""
        self.run_id = self._read_run_id()
        with bar(f"reading {self.name}", self._index.unread(self.run_id)) as count:
            self._index.update(self.run_id, count)

    # -- the run

    def config(self) -> Settings:
        """The resolved configuration as plain values; {} without one."""
        with suppress(FileNotFoundError):
            written = (self.run_dir / "config.yaml").stat().st_mtime_ns
            if self._config is None or self._config[0] != written:
                self._config = written, read_settings(self.run_dir)
            return self._config[1]
        return {}

    def changed_settings(self) -> list[str] | None:
        """The dotted keys of `config` whose values are not the defaults, sorted; None if this release cannot read it."""
        settings = self.config()
        if self._changed is None or self._changed[0] is not settings:
            self._changed = settings, changed_settings(self.run_dir)
        return self._changed[1]

    def summary(self) -> Line:
        """The fields of summary.json with the current `state`: `interrupted` if the run did not end and no process owns it."""
        fields = read_summary(self.run_dir)
        fields = fields if fields.get("run") == self.run_id else {"run": self.run_id, "state": "starting", "reason": ""}
        if fields.get("state") not in ENDED:
            with unused(self.run_dir) as free:
                if free:
                    fields |= {"state": "interrupted", "reason": "the process that trained it is gone; --resume continues it"}
        return fields

    def contents(self) -> Contents:
        """The index's content as of the last `refresh`."""
        updated = self._index.updated
        if self._contents is None or updated is None or self._contents[0] != updated:
            with self._index.read() as connection:
                meta = read_meta(connection)
                rows = connection.execute(_METRICS).fetchall() if meta else []
            names, zeros = tuple(row["name"] for row in rows), tuple(row["name"] for row in rows if row["zero"])
            found = Contents(int(meta.get("iteration", 0)), int(meta.get("samples", 0)), names, zeros)
            self._contents = updated, found
        return self._contents[1]

    # -- metrics

    def newest_values(self) -> dict[str, float]:
        """The newest value of each metric, as of the last `refresh`."""
        updated = self._index.updated
        if self._newest is None or updated is None or self._newest[0] != updated:
            with self._index.read() as connection:
                rows = connection.execute(_NEWEST).fetchall() if read_meta(connection) else []
            self._newest = updated, {row["name"]: row["value"] for row in rows}
        return self._newest[1]

    def series(self, name: str, first: int = 0, last: int = LAST_STEP) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A metric's steps from `first` to `last`, int64 [n], ascending, and values, float64 [n]. Empty if the run lacks it."""
        metric = "(SELECT id FROM metric WHERE name = ?)"
        query = f"SELECT step, value FROM point WHERE metric = {metric} AND step BETWEEN ? AND ? ORDER BY step"
        with self._index.read() as connection:
            cursor = connection.cursor()
            cursor.row_factory = None  # plain tuples: half the time for a long series
            points = cursor.execute(query, [name, first, last]).fetchall() if read_meta(connection) else []
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        return table[:, 0].astype(np.int64), table[:, 1]

    def curve(self, name: str, points: int, first: int = 0) -> Series:
        """A metric, or one of `AXES`, from the step `first` on, in at most `points` points."""
        if name in AXES:
            steps, values = positions(name, self.series)
            return last_of_each(steps[steps >= first], values[steps >= first], points)
        return downsample(*self.series(name, first), points)

    def events(
        self, kinds: Sequence[str] = (), since: float = 0.0, until: float = float("inf"), newest: int | None = None
    ) -> list[Line]:
        """The records that are not rows of numbers (see docs/reference/records.md), in order, with `kind` and `time`.

        Args:
            kinds: kinds of records; empty: all.
            since, until: inclusive bounds of their Unix time.
            newest: maximum number; the newest ones are returned.
        """
        places = ", ".join("?" * len(kinds))
        condition = f" AND kind IN ({places})" if kinds else ""
        query = f"SELECT kind, time, data FROM event WHERE time >= ? AND time <= ?{condition} ORDER BY id DESC LIMIT ?"
        with self._index.read() as connection:
            values = [since, until, *kinds, -1 if newest is None else newest]
            found = connection.execute(query, values).fetchall() if read_meta(connection) else []
        return [_event(row) for row in reversed(found)]

    def commits(self, newest: int) -> dict[str, tuple[int, list[Line]]]:
        """For each replica, the number of its `commit` records, and at most `newest` of them, the last ones, in order."""
        counted = "SELECT replica, count(*) FROM event WHERE kind = 'commit' GROUP BY replica"
        query = "SELECT kind, time, data FROM event WHERE kind = 'commit' AND replica = ? ORDER BY time DESC, id DESC LIMIT ?"
        with self._index.read() as connection:
            counts = connection.execute(counted).fetchall() if read_meta(connection) else []
            found = {name: (count, connection.execute(query, [name, newest]).fetchall()) for name, count in counts}
        return {name: (count, [_event(row) for row in reversed(rows)]) for name, (count, rows) in found.items()}

    def group_spans(self, first: int, last: int) -> list[Line]:
        """When the groups of iterations `first` to `last` were generated and scored: `step`, `group`, `began` (Unix seconds),
        `generate` and `score` (seconds), `replicas`."""
        query = "SELECT * FROM span WHERE step BETWEEN ? AND ? ORDER BY began"
        with self._index.read() as connection:
            found = connection.execute(query, [first, last]).fetchall() if read_meta(connection) else []
        return [{**dict(row), "replicas": json.loads(row["replicas"])} for row in found]

    # -- samples

    def find_samples(self, wanted: SampleQuery, offset: int = 0, limit: int = 50) -> tuple[int, list[Sample]]:
        """The number of matching samples, and `limit` of them from `offset` on."""
        with self._index.read() as connection:
            return samples.find(connection, wanted, offset, limit) if read_meta(connection) else (0, [])

    def newest_step(self, kind: str) -> int | None:
        """The newest iteration ("eval": version) that has samples of a kind; None without any."""
        with self._index.read() as connection:
            return samples.newest_step(connection, kind) if read_meta(connection) else None

    def read_samples(self, wanted: SampleQuery) -> Iterator[Sample]:
        """Yields the lines of the matching samples, in order. Memory does not grow with their number. Raises ConfigError when one
        of their files is missing or has changed."""
        with self._index.read() as connection:
            found = samples.places(connection, wanted) if read_meta(connection) else iter(())
            for name, in_file in itertools.groupby(found, key=lambda place: place[0]):
                yield from self._lines(name, ((start, size) for _, start, size in in_file))

    def sample(self, sample_id: str) -> Sample | None:
        """Everything that the run recorded about a sample: the columns of the index and fields of its line. None: no such sample.

        Args:
            sample_id: GROUP.SAMPLE of a trained sample, vVERSION.ROW of an answer in an evaluation.

        Raises:
            ConfigError: its file is missing or has changed.
        """
        with self._index.read() as connection:
            found = samples.place(connection, sample_id) if read_meta(connection) else None
            if found is None:
                return None
            number, name, start, size = found
            [row] = samples.rows(connection, [number])
        [line] = self._lines(name, [(start, size)])
        return {**line, **row}

    def _lines(self, name: str, places: Iterable[tuple[int, int]]) -> Iterator[Sample]:
        """Yields the lines of a sample file at the given byte offsets, with the given sizes."""
        path = self.run_dir / "samples" / name
        try:
            with open(path, "rb") as file:
                for start, size in places:
                    file.seek(start)
                    yield json.loads(file.read(size))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} as it was indexed", str(error), f"Restore it, or delete {INDEX}, which is then built without it."
            ) from None

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; "" if the run did not record its vocabulary."""
        return [self._vocabulary[number] if 0 <= number < len(self._vocabulary) else "" for number in ids]

    @cached_property
    def _vocabulary(self) -> list[str]:
        try:
            found: list[str] = json.loads((self.run_dir / VOCABULARY).read_text())
        except FileNotFoundError:
            return []
        return found


def _event(row: sqlite3.Row) -> dict[str, object]:
    return {"kind": row["kind"], "time": row["time"], **json.loads(row["data"])}


def _index_path(run_dir: Path) -> Path:
    """The path of the index: in the run directory, or in the user's cache if it or that directory is not writable."""
    if os.access(run_dir, os.W_OK) and (os.access(run_dir / INDEX, os.W_OK) or not (run_dir / INDEX).exists()):
        return run_dir / INDEX
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyreme"
    return make_folder(cache, "XDG_CACHE_HOME") / f"{xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())}.sqlite"
