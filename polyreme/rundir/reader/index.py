"""The index of one run directory: an SQLite file with its metrics, events and samples, built incrementally from the run's files.

Invariant: the index has the content of one run's files at its last update. An update is one transaction, so processes that share
an index see only whole updates, and a line is added once. A sample file is added with the record that announces it, since the run
writes the file first. The index can always be rebuilt from the files.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from polyreme.errors import ConfigError, UnavailableError
from polyreme.rundir.reader.index_rows import SampleRow, event_of, points_of, sample_files_of, sample_row, step_of
from polyreme.rundir.run_records import parsed, whole_lines

SCHEMA = 3
"""Version of the tables. An index with another version is rebuilt."""

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE metric (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE point (metric INTEGER, step INTEGER, value REAL, PRIMARY KEY (metric, step)) WITHOUT ROWID;
CREATE TABLE event (id INTEGER PRIMARY KEY, time REAL, kind TEXT, replica TEXT, data TEXT);
CREATE INDEX event_kind ON event (kind, replica, time);
CREATE TABLE prompt (id INTEGER PRIMARY KEY, prompt TEXT, label TEXT, UNIQUE (prompt, label));
CREATE TABLE sample (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, kind TEXT, step INTEGER, "group" INTEGER, position INTEGER, prompt INTEGER,
    score REAL, tokens INTEGER, finish TEXT, oldest INTEGER, newest INTEGER, replica TEXT, advantage REAL, logprob REAL,
    file TEXT, start INTEGER, size INTEGER, response TEXT
);
CREATE INDEX sample_kind ON sample (kind, step);
CREATE INDEX sample_step ON sample (step);
CREATE INDEX sample_prompt ON sample (prompt);
CREATE TABLE span (step INTEGER, "group" INTEGER, began REAL, generate REAL, score REAL, replicas TEXT, \
PRIMARY KEY (step, "group"))
    WITHOUT ROWID;
"""
_SAMPLE = (
    'INSERT OR REPLACE INTO sample (id, kind, step, "group", position, prompt, score, tokens, finish, oldest, newest, replica,'
    " advantage, logprob, file, start, size, response) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_BUSY_SECONDS = 60.0
_LINES_AT_ONCE = 500
_BYTES_AT_ONCE = 64 * 2**20
"""Maximum bytes of sample files in one transaction, which holds the write lock. The last file may exceed it."""
_TURN_SECONDS, _PAUSE_SECONDS = 5.0, 0.15
"""Seconds of one process's successive transactions, and its pause for others. SQLite retries a lock every 0.1 seconds."""


class Index:
    """The index of the run directory `run_dir`, in the file `path`.

    Attributes:
        updated: the state of the files at the last `update`. It changes whenever an update adds something; None before the first.
    """

    def __init__(
        self, run_dir: Path, path: Path, bytes_at_once: int = _BYTES_AT_ONCE, busy_seconds: float = _BUSY_SECONDS
    ) -> None:
        self._run_dir, self._path, self._bytes_at_once, self._busy_seconds = run_dir, path, bytes_at_once, busy_seconds
        self.updated: tuple[str, int, int, int] | None = None

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries; rows are accessible by name."""
        with self._connect() as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def update(self, run_id: str, advance: Callable[[int], None] = lambda size: None) -> bool:
        """Adds the new content of the run's files. Returns whether anything was added.

        Args:
            run_id: id of the directory's run. An index of another run is rebuilt.
            advance: called with the bytes of metrics.jsonl that were added since the last call.

        Raises:
            UnavailableError: another process has held the index's lock for `busy_seconds`.
            ConfigError: the index, metrics.jsonl or a sample file is damaged.
        """
        files = self._files(run_id)
        if files == self.updated and files[2]:  # a deleted index is built again
            return False
        added, turn = False, time.monotonic()
        while self.unread(run_id) > 0:
            if time.monotonic() - turn > _TURN_SECONDS:
                time.sleep(_PAUSE_SECONDS)
                turn = time.monotonic()
            with self._connect() as connection:
                connection.execute("BEGIN IMMEDIATE")
                self._create(connection, run_id)
                size = self._add_records(connection, run_id)
                connection.execute("COMMIT")
            if not size:
                break
            added = True
            advance(size)
        self.updated = files
        return added

    def _files(self, run_id: str) -> tuple[str, int, int, int]:
        """Values that change when an update may find something: the run, the size of metrics.jsonl, and the index's inode and
        time of change (since a new file may reuse the inode of a deleted one). Costs only two calls of stat, so a page may check
        often."""
        metrics, index = _stat(self._run_dir / "metrics.jsonl"), _stat(self._path)
        return run_id, metrics.st_size if metrics else 0, index.st_ino if index else 0, index.st_ctime_ns if index else 0

    def unread(self, run_id: str) -> int:
        """The bytes of metrics.jsonl that an update would add; more than 0 for an index of another run."""
        with self._connect() as connection:
            meta = read_meta(connection)
        size = self._files(run_id)[1]
        return size - int(meta["offset"]) if self._is_known(meta, run_id) else max(1, size)

    def _is_known(self, meta: Mapping[str, str], run_id: str) -> bool:
        """Whether an index has a part of the run's file: it may be of another run or schema, or the file may be an older copy."""
        known = meta.get("run") == run_id and meta.get("schema") == str(SCHEMA)
        return known and int(meta["offset"]) <= self._files(run_id)[1]

    def _create(self, connection: sqlite3.Connection, run_id: str) -> None:
        """Empties an index that is not of the run's file."""
        if self._is_known(read_meta(connection), run_id):
            return
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f'DROP TABLE "{name}"')
        for statement in filter(str.strip, _TABLES.split(";")):
            connection.execute(statement)
        values = {"run": run_id, "schema": str(SCHEMA), "offset": "0", "iteration": "0", "samples": "0"}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())

    def _add_records(self, connection: sqlite3.Connection, run_id: str) -> int:
        """Adds some lines of metrics.jsonl and the sample files that they announce. Returns the bytes of the lines."""
        meta = read_meta(connection)
        offset, iteration = int(meta["offset"]), int(meta["iteration"])
        lines = list(islice(whole_lines(self._run_dir / "metrics.jsonl", offset), _LINES_AT_ONCE))
        if not lines:
            return 0
        metrics: dict[str, int] = dict(connection.execute("SELECT name, id FROM metric").fetchall())
        points, events, files, dropped, size = [], [], list[str](), list[str](), 0
        end = offset
        for after, line in lines:
            if size >= self._bytes_at_once:
                break
            end = after
            record = parsed(line, self._run_dir / "metrics.jsonl")
            if record.get("run") != run_id:
                continue
            iteration = max(iteration, step_of(record))
            announced, old = sample_files_of(record)
            files += announced
            dropped += old
            size += sum(found.st_size for name in announced if (found := _stat(self._run_dir / "samples" / name)))
            for name, value, step in points_of(record):
                if name not in metrics:
                    metrics[name] = len(metrics) + 1
                    connection.execute("INSERT INTO metric VALUES (?, ?)", (metrics[name], name))
                points.append((metrics[name], step, value))
            if event := event_of(record):
                events.append((record["time"], record["kind"], record.get("replica"), json.dumps(event)))
        points.sort()
        connection.executemany("INSERT OR IGNORE INTO point VALUES (?, ?, ?)", points)
        connection.executemany("INSERT INTO event (time, kind, replica, data) VALUES (?, ?, ?, ?)", events)
        values = {"offset": str(end), "iteration": str(iteration)}
        if files:
            prompts: dict[tuple[str, str], int] = {}
            for name in files:
                self._add_sample_file(connection, name, prompts)
            _drop_sample_files(connection, dropped)
            values["samples"] = str(connection.execute("SELECT count(*) FROM sample").fetchone()[0])
        _write_meta(connection, values)
        return end - offset

    def _add_sample_file(self, connection: sqlite3.Connection, name: str, prompts: dict[tuple[str, str], int]) -> None:
        """Adds one file. `prompts` maps the prompts that this transaction has seen to their rows."""
        rows: list[tuple[object, ...]] = []
        spans: dict[tuple[int, int], tuple[object, ...]] = {}
        path = self._run_dir / "samples" / name
        for number, (end, line) in enumerate(whole_lines(path), start=1):
            row = _sample_row(line, f"line {number} of {path}")
            text = row.prompt, row.label
            if text not in prompts:
                prompts[text] = _prompt_id(connection, *text)
            rows.append((*_columns(row, prompts[text]), name, end - len(line), len(line), row.response))
            if row.began is not None:
                replicas = json.dumps(row.replicas)
                spans[row.step, row.group] = (row.step, row.group, row.began, row.generate_seconds, row.score_seconds, replicas)
        connection.executemany(_SAMPLE, rows)
        connection.executemany("INSERT OR REPLACE INTO span VALUES (?, ?, ?, ?, ?, ?)", spans.values())

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=self._busy_seconds, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = OFF")  # a lost index is rebuilt
                yield connection
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                waited = f"another process has been writing it for {self._busy_seconds:g} s"
                raise UnavailableError(
                    f"the lock of the index {self._path}", waited, "Wait until it is built, then try again."
                ) from error
            raise ConfigError(f"a usable index {self._path}", str(error), "Delete the file; it is built again.") from error


def _drop_sample_files(connection: sqlite3.Connection, names: Sequence[str]) -> None:
    """Drops the samples of deleted files, and prompts and spans without a sample."""
    for name in names:
        groups = 'SELECT step, "group" FROM sample WHERE file = ?'
        connection.execute(f'DELETE FROM span WHERE (step, "group") IN ({groups})', [name])
        connection.execute("DELETE FROM sample WHERE file = ?", [name])
    if names:
        connection.execute("DELETE FROM prompt WHERE id NOT IN (SELECT prompt FROM sample)")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """The index's own values; empty before the first update."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return {}
    return {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def _sample_row(line: bytes, where: str) -> SampleRow:
    try:
        return sample_row(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a sample in {where}", repr(error), "Restore or remove the file.") from None


def _write_meta(connection: sqlite3.Connection, values: Mapping[str, str]) -> None:
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def _prompt_id(connection: sqlite3.Connection, prompt: str, label: str) -> int:
    connection.execute("INSERT OR IGNORE INTO prompt (prompt, label) VALUES (?, ?)", (prompt, label))
    (number,) = connection.execute("SELECT id FROM prompt WHERE prompt = ? AND label = ?", (prompt, label)).fetchone()
    return int(number)


def _columns(row: SampleRow, prompt: int) -> tuple[object, ...]:
    """A sample's columns from `id` to `logprob`."""
    replica = " ".join(row.replicas)
    of_score = (row.score, row.tokens, row.finish, row.oldest, row.newest)
    return (row.id, row.kind, row.step, row.group, row.position, prompt, *of_score, replica, row.advantage, row.logprob)
