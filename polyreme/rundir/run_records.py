"""The records of a run in its directory: metrics.jsonl and summary.json.

Invariant: a reader of summary.json sees the old or the new file. A reader of metrics.jsonl sees only complete lines of one run.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.experience.metric_records import Line
from polyreme.experience.run import RunState
from polyreme.rundir.progress import Progress


def whole_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file from a byte offset on, each with the offset after it; not a last line that is still being
    written."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, line


def read_records(run_dir: Path, run_id: str) -> Iterator[Line]:
    """Yields the run's records in metrics.jsonl in order. Raises ConfigError for a damaged one."""
    path = run_dir / "metrics.jsonl"
    for _, line in whole_lines(path):
        if (record := parsed(line, path)).get("run") == run_id:
            yield record


def add_written(progress: Progress, run_dir: Path, run_id: str) -> str:
    """Adds the run's records on disk; Redis may have trimmed them. Returns the stream id of the last one, "0" without any."""
    cursor = "0"
    for line in read_records(run_dir, run_id):
        progress.add(line)
        cursor = line.get("id", cursor)
    return cursor


def parsed(line: bytes, path: Path) -> Line:
    """The record in a line of `path`. Raises ConfigError when there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        found = repr(line[:60].decode(errors="replace"))
        raise ConfigError(
            f"a JSON object in each line of {path}", f"a line that starts with {found}", "Remove the line, or restore the file."
        )
    return record


def write_summary(run_dir: Path, run_id: str, state: RunState, reason: str, numbers: Mapping[str, object]) -> None:
    """Writes summary.json: the run id, its state, the reason for the state, and `numbers`."""
    fields = {"run": run_id, "state": str(state), "reason": reason, **numbers}
    write_atomically(run_dir / "summary.json", json.dumps(fields, indent=1) + "\n")


def write_end(run_dir: Path, run_id: str, state: RunState, reason: str) -> None:
    """Updates state and reason in the run's summary.json and keeps its other values."""
    fields = read_summary(run_dir)
    numbers = {name: value for name, value in fields.items() if name not in ("run", "state", "reason")}
    write_summary(run_dir, run_id, state, reason, numbers if fields.get("run") == run_id else {})


def read_summary(run_dir: Path) -> Line:
    """The fields of summary.json, or {} when the file is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        fields = json.loads((run_dir / "summary.json").read_text())
        if isinstance(fields, dict):
            return fields
    return {}


def check_new_file(path: Path, option: str) -> None:
    """Raises ConfigError when no file can be created at the path that an option names."""
    if path.exists():
        raise ConfigError(f"no file {path} yet", "one is there", f"Choose another name for {option}, or remove the file.")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"a folder that can be written to, for {option}", str(path.parent), "Create it, or choose another one.")


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader, also after a crash, sees the old content or the new one and never a part. Several processes
    may do so at the same time, also in containers, whose processes have the same ids: the last one counts."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
