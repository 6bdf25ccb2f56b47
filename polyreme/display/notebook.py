"""`polyreme.Run`: a run in a notebook or a script.

Invariant: nothing is cached: each call reads the current records of the run. Only `stop` changes the run. Neither pandas nor
polars is imported before a table is requested, and neither is required.
"""

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from polyreme.config.load import parse_config
from polyreme.display.view import view
from polyreme.errors import ConfigError, UnavailableError
from polyreme.experience.metric_records import Line
from polyreme.rundir.progress import Progress
from polyreme.rundir.reader import EVERYTHING, Range, RunReader, sample_query
from polyreme.rundir.run_directory import Settings
from polyreme.rundir.run_records import read_summary
from polyreme.rundir.run_source import open_source
from polyreme.rundir.run_status import RunStatus
from polyreme.terminal.terminal import TerminalConsole

if TYPE_CHECKING:
    import pandas
    import polars

Library = Literal["pandas", "polars"]
_LIBRARIES = ("pandas", "polars")
_POLL_SECONDS = 0.5
STOP_SECONDS = 660.0
"""Timeout in seconds for the current iteration, its save, and the end of the processes."""


class RunHandle:
    """One run or stage, live or ended.

    Args:
        place: a run directory, or the URL of a run's Redis.
        run_id: with a URL, a run other than the newest one.

    Attributes:
        run_id: id of the run.
        run_dir: its directory, or None when only its Redis is known.

    Raises:
        ConfigError: there is no run at the place.
        StoreError, UnavailableError: Redis cannot be reached, or does not have the run.
    """

    def __init__(self, place: str | Path, run_id: str | None = None) -> None:
        self._source = open_source(place, run_id)
        self.run_id, self.run_dir = self._source.run_id, self._source.run_dir

    def __repr__(self) -> str:
        status = self.status()
        return f"<polyreme.Run {self.run_id}: {status.state}, iteration {status.iteration} of {status.iterations}>"

    def status(self) -> RunStatus:
        """State, iteration, newest result and replicas."""
        return self._source.status()

    def config(self) -> Settings:
        """The resolved configuration as nested mappings of JSON values."""
        return self._source.settings()

    def summary(self) -> Line:
        """The values of summary.json. For a run in Redis, those that follow from the records that Redis still has."""
        if self.run_dir is not None:
            return read_summary(self.run_dir)
        progress, status = Progress(_samples_per_iteration(self.config())), self.status()
        for record in self.records():
            progress.add(record)
        return {"run": self.run_id, "state": status.state, "reason": status.reason, **progress.summary()}

    def records(self, kind: str | None = None) -> list[Line]:
        """The run's records of one kind, or all, in order; see docs/reference/records.md. Repeated iterations are omitted."""
        _, found = self._source.records("")
        newest, chosen = 0, []
        for record in found:
            if record["kind"] == "iteration":
                if record["iteration"] <= newest:
                    continue
                newest = record["iteration"]
            if kind in (None, record["kind"]):
                chosen.append(record)
        return chosen

    @overload
    def metrics(self, kind: str = ..., *, library: Literal["polars"]) -> "polars.DataFrame": ...
    @overload
    def metrics(self, kind: str = ..., *, library: Literal["pandas"] | None = ...) -> "pandas.DataFrame": ...
    def metrics(self, kind: str = "iteration", *, library: Library | None = None) -> "pandas.DataFrame | polars.DataFrame":
        """The metrics of every record of a kind as a table, one row per record, one column per metric.

        Args:
            kind: "iteration", "eval", "commit" or another kind; of a stage: "step" or "eval".
            library: of the table. None: pandas if it is installed, else polars.

        Raises:
            ConfigError: the library is not installed.
        """
        without = ("run", "id", "kind")
        rows = ({name: value for name, value in record.items() if name not in without} for record in self.records(kind))
        return to_table(rows, library)

    @overload
    def samples(
        self,
        iterations: Range = ...,
        reward: Range = ...,
        tokens: Range = ...,
        text: str = ...,
        evaluation: bool = ...,
        limit: int | None = ...,
        *,
        library: Literal["polars"],
    ) -> "polars.DataFrame": ...
    @overload
    def samples(
        self,
        iterations: Range = ...,
        reward: Range = ...,
        tokens: Range = ...,
        text: str = ...,
        evaluation: bool = ...,
        limit: int | None = ...,
        *,
        library: Literal["pandas"] | None = ...,
    ) -> "pandas.DataFrame": ...
    def samples(
        self,
        iterations: Range = EVERYTHING,
        reward: Range = EVERYTHING,
        tokens: Range = EVERYTHING,
        text: str = "",
        evaluation: bool = False,
        limit: int | None = None,
        *,
        library: Library | None = None,
    ) -> "pandas.DataFrame | polars.DataFrame":
        """Samples as a table, one row per sample.

        Args:
            iterations: first and last iteration, or None for no bound; of evaluations: policy versions.
            reward: range of the total reward, likewise.
            tokens: range of the response's length in tokens, likewise.
            text: part of the prompt, the label or the response, in any case.
            evaluation: the answers of evaluations instead of the samples that were trained on.
            limit: maximum number of samples.
            library: as in `metrics`.

        Raises:
            ConfigError: the run directory is unknown, or the library is not installed.
        """
        if self.run_dir is None:
            raise ConfigError(
                "a run directory, which has the samples", "a Redis URL", "Create polyreme.Run from the run directory."
            )
        reader = RunReader(self.run_dir)
        reader.catch_up()
        found = reader.read_samples(sample_query("eval" if evaluation else "train", iterations, reward, tokens, text))
        return to_table(itertools.islice(found, limit), library)

    def follow(self, timeout: float | None = None) -> Iterator[Line]:
        """Yields the run's records, those that exist, then new ones, until the run has ended or `timeout` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        cursor = ""
        while True:
            over = self.status().ended or (deadline is not None and time.monotonic() >= deadline)  # checked before the last read
            cursor, found = self._source.records(cursor)
            yield from found
            if over:
                return
            time.sleep(_POLL_SECONDS)

    def watch(self, timeout: float | None = None) -> RunStatus:
        """Shows the run's progress as `polyreme up` does, until it has ended or `timeout` seconds have passed. An interrupt also
        ends it, and does not affect the run.

        Raises:
            ConfigError: a stage, which has no such view, or a configuration of another release.
        """
        settings = self.config()
        if "stage" in settings:
            raise ConfigError("a run with rollouts", f"the stage {settings['stage']}", "Use polyreme.Run(...).follow().")
        config = parse_config(settings, self.run_id)
        progress, began = Progress(config.samples_per_iteration), time.time()
        with view(config, TerminalConsole(sys.stdout)) as shown:
            shown.status(self.status().state)
            try:
                for record in self.follow(timeout):
                    progress.add(record)
                    if record["time"] >= began or record["kind"] in ("iteration", "eval"):
                        shown.show(record, progress)
            except KeyboardInterrupt:
                pass
            status = self.status()
            shown.status(f"{status.state}: {status.reason}" if status.reason else status.state)
        return status

    def stop(self, wait: bool = True, timeout: float = STOP_SECONDS) -> RunStatus:
        """Asks the run to finish its current iteration, save it and end. Does nothing when it has ended.

        Args:
            wait: until the run has ended.
            timeout: seconds to wait.

        Raises:
            UnavailableError: the run has not ended within `timeout` seconds; it still drains.
            ConfigError: a stage.
        """
        if self.status().ended:
            return self.status()
        self._source.ask_to_stop()
        deadline = time.monotonic() + timeout
        while wait and not self.status().ended:
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"the end of run {self.run_id} within {timeout:g} s",
                    f"state {self.status().state}",
                    "Wait longer, or see its logs.",
                )
            time.sleep(_POLL_SECONDS)
        return self.status()


def _samples_per_iteration(settings: Settings) -> int:
    return int(settings["groups_per_iteration"]) * int(settings["group_size"])


def to_table(rows: Iterable[Mapping[str, Any]], library: Library | None = None) -> Any:
    """A DataFrame with one row per mapping. A mapping inside a row becomes columns named `outer.inner`; a missing value is null.

    Args:
        rows: JSON values by column.
        library: pandas or polars. None: the first of these that is installed.

    Raises:
        ConfigError: the library is not installed.
    """
    chosen: str | None = library or next((name for name in _LIBRARIES if find_spec(name)), None)
    if chosen not in _LIBRARIES:
        raise ConfigError("pandas or polars", str(chosen or "neither"), "Install one: pip install pandas.")
    if not find_spec(chosen):
        raise ConfigError(f"an installed {chosen}", "none", f"Install it: pip install {chosen}.")
    flat = [dict(_columns(row)) for row in rows]
    frames = import_module(chosen)
    if chosen == "pandas":
        return frames.DataFrame(flat)
    return frames.DataFrame(flat, infer_schema_length=None, strict=False)


def _columns(row: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
