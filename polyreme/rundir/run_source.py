"""The source of a run's records: its directory or its Redis.

Invariant: a source only reads, except `ask_to_stop`. A call may come from a thread with a running event loop, as in a notebook.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from polyreme.errors import ConfigError
from polyreme.experience.listing import attached, list_run
from polyreme.experience.metric_records import Line
from polyreme.experience.run import Run, RunState
from polyreme.net.redis_url import without_password
from polyreme.rundir.progress import stream_time
from polyreme.rundir.run_directory import NO_REDIS, RunFile, Settings, no_run, read_run_file, read_settings, redis_of
from polyreme.rundir.run_records import parsed, whole_lines
from polyreme.rundir.run_status import RunStatus, directory_status, redis_status

Value = TypeVar("Value")
_ATTACH_SECONDS = 5.0


class DirectorySource:
    """Reads a run directory.

    Attributes:
        run_id: id of the run.
        run_dir: its directory; of a `RedisSource` None.
    """

    def __init__(self, run_dir: Path) -> None:
        found = read_run_file(run_dir)
        if found is None:
            raise no_run(run_dir, do="Pass output_dir/name of a run, or a Redis URL.")
        self.run_dir: Path | None = run_dir
        self.run_id, self._folder = found.run_id, run_dir

    def status(self) -> RunStatus:
        return directory_status(self._folder)

    def settings(self) -> Settings:
        """The resolved configuration as plain values."""
        return read_settings(self._folder)

    def records(self, after: str) -> tuple[str, list[Line]]:
        """The records after a cursor ("": from the first one on), and the new cursor. Each has its Unix `time`."""
        path, end, found = self._folder / "metrics.jsonl", int(after or 0), []
        for after_line, line in whole_lines(path, end):
            end = after_line
            if (record := parsed(line, path)).get("run") == self.run_id:
                found.append(record)
        return str(end), found

    def ask_to_stop(self) -> None:
        """Asks the run to save and end after its current iteration."""
        found = read_run_file(self._folder)
        in_redis(_redis_of(self._folder, found), self.run_id, _drain)


class RedisSource:
    """Reads a run in Redis. Old records may be missing there: the trainer removes those that are in the run directory."""

    run_dir: Path | None = None

    def __init__(self, url: str, run_id: str | None) -> None:
        self._url = str(without_password(url))
        self.run_id = in_redis(self._url, run_id, _run_id)

    def status(self) -> RunStatus:
        async def look(run: Run) -> RunStatus:
            return redis_status(await list_run(run.redis, run.run_id), self._url)

        return in_redis(self._url, self.run_id, look)

    def settings(self) -> Settings:
        async def look(run: Run) -> Settings:
            return (await run.config()).model_dump(mode="json")

        return in_redis(self._url, self.run_id, look)

    def records(self, after: str) -> tuple[str, list[Line]]:
        async def look(run: Run) -> tuple[str, list[Line]]:
            cursor, found = after or "0", []
            while batch := await run.records(cursor, block_ms=0):
                cursor = batch[-1][0]
                found += [{"time": stream_time(at), "id": at, **record} for at, record in batch]
            return cursor, found

        return in_redis(self._url, self.run_id, look)

    def ask_to_stop(self) -> None:
        in_redis(self._url, self.run_id, _drain)


def open_source(place: str | Path, run_id: str | None = None) -> DirectorySource | RedisSource:
    """The source of a run directory, or of a Redis URL. `run_id`: with a URL, a run other than the newest."""
    if isinstance(place, str) and place.partition("://")[0] in ("redis", "rediss", "unix"):
        return RedisSource(place, run_id)
    if isinstance(place, str) and "://" in place:
        raise ConfigError(
            "a run directory, or the URL of a run's Redis (redis://..., rediss://..., unix://...)",
            f"{place.partition('://')[0]}://...",
            "run.json and the first lines of `polyreme up` have the URL.",
        )
    if run_id is not None:
        raise ConfigError("a Redis URL with a run id", f"the path {place}", "Omit run_id: a directory has one run.")
    return DirectorySource(Path(place))


def in_redis(url: str, run_id: str | None, look: Callable[[Run], Coroutine[object, object, Value]]) -> Value:
    """Connects to Redis, attaches to the run (None: the newest one) and awaits `look(run)`.

    Raises:
        StoreError, UnavailableError: Redis or the run cannot be reached. Other errors are those of `look`.
    """

    async def call() -> Value:
        async with attached(url, run_id, _ATTACH_SECONDS) as run:
            return await look(run)

    with ThreadPoolExecutor(1) as thread:  # the calling thread may have a running event loop
        return thread.submit(lambda: asyncio.run(call())).result()


def _redis_of(run_dir: Path, found: RunFile | None) -> str:
    if found is None or found.redis == NO_REDIS:
        raise ConfigError(f"a run with a Redis at {run_dir}", "a stage, which has none", "Send SIGTERM to its process.")
    return redis_of(run_dir, found)


async def _run_id(run: Run) -> str:
    return run.run_id


async def _drain(run: Run) -> None:
    if not (await run.state())[0].ended:
        await run.set_state(RunState.DRAINING, "stop requested")
