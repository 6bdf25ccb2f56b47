"""The lines of a run's log files, by time.

Invariant: a reader never sees a partial line: text without a newline yet belongs to the next read. Memory does not grow with the
files.
"""

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.rundir.run_directory import no_run, read_run_file
from polyreme.rundir.run_records import whole_lines

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*Z?")


@dataclass(frozen=True)
class LogLine:
    """A line of a process's log. `time` is its ISO 8601 time stamp, or that of the previous line; '' before the first."""

    process: str
    time: str
    text: str


class LogFile:
    """Reads a log file in steps, as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.process = path, path.stem
        self._offset, self._time = 0, ""

    def read(self) -> Iterator[LogLine]:
        """Yields the complete lines since the previous call."""
        for end, line in whole_lines(self.path, self._offset):
            self._offset = end
            yield self._line(line[:-1].decode(errors="replace"))

    def _line(self, text: str) -> LogLine:
        if stamp := _STAMP.match(text):
            self._time = stamp.group()
        return LogLine(self.process, self._time, text)


def newest_attempt(run_dir: Path) -> Path:
    """The folder of the newest start's logs. Raises ConfigError without one."""
    found = [path for path in run_dir.glob("logs/attempt_*") if path.name.removeprefix("attempt_").isdigit()]
    if not found and read_run_file(run_dir) is None:
        raise no_run(run_dir)
    if not found:
        raise ConfigError(f"logs of a run in {run_dir}", "no logs/attempt_1 in it", "Pass output_dir/name of a run.")
    return max(found, key=lambda path: int(path.name.removeprefix("attempt_")))


def log_files(attempt: Path, process: str = "") -> list[LogFile]:
    """The log files of an attempt, sorted by name.

    Args:
        attempt: the folder.
        process: a process such as rollout-0, or a service such as rollout, which stands for all its processes. '': every process.

    Raises:
        ConfigError: no log file belongs to the process; the message lists the existing ones.
    """
    files = [LogFile(path) for path in sorted(attempt.glob("*.log"))]
    chosen = [file for file in files if not process or file.process == process or file.process.startswith(f"{process}-")]
    if not chosen and process:
        names = ", ".join(file.process for file in files) or "none"
        raise ConfigError(f"the log of a process {process!r} in {attempt}", names, "Pass one of these.")
    return chosen


def in_order(files: Iterable[LogFile]) -> Iterator[LogLine]:
    """Yields the new lines of several files by time. Lines of one file keep their order."""
    return heapq.merge(*(file.read() for file in files), key=lambda line: line.time)


def printed(lines: Iterable[LogLine], width: int) -> Iterator[str]:
    """Lines prefixed with their process, padded to `width` characters."""
    return (f"{line.process:{width}} | {line.text}" for line in lines)
