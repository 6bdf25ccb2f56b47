"""Sends a run's metrics from metrics.jsonl to one tracker.

Invariant: metrics.jsonl is the queue. It has each iteration once, and the tracker's cursor has the position up to which it was
sent. A tracker that is slow, unreachable or restarted gets every record in order, and training never waits for one. A process
that is killed after sending a record and before writing its cursor sends that record again.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from polyreme.config.base import BaseConfig
from polyreme.config.trackers import TrackerSection
from polyreme.errors import PolyremeError
from polyreme.experience.metric_records import Line
from polyreme.rundir.reader.scalars import scalars
from polyreme.rundir.run_records import write_atomically
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun, open_tracker

POLL_SECONDS = 0.5
BATCH_BYTES = 1 << 20
"""The bytes of lines that are read before the cursor is written."""


@dataclass(frozen=True)
class Cursor:
    """The position of a tracker, stored in RUN_DIR/trackers/KIND.json.

    Attributes:
        run: Polyreme's run id.
        tracker_id: the tracker's id of the run; None before it was first opened.
        offset: the bytes of metrics.jsonl that were sent.
    """

    run: str
    tracker_id: str | None = None
    offset: int = 0


def cursor_path(run_dir: Path, kind: str) -> Path:
    """The path of a tracker's cursor."""
    return run_dir / "trackers" / f"{kind}.json"


def read_cursor(run_dir: Path, kind: str, run_id: str) -> Cursor:
    """The tracker's cursor; a new one when the stored cursor belongs to another run. Raises PolyremeError when it is damaged."""
    path = cursor_path(run_dir, kind)
    try:
        found = Cursor(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Cursor(run_id)
    except (ValueError, TypeError) as error:
        raise PolyremeError(
            f"a tracker's cursor in {path}", str(error), "Remove the file: the tracker then gets a new run with all records."
        ) from None
    return found if found.run == run_id else Cursor(run_id)


def write_cursor(run_dir: Path, kind: str, cursor: Cursor) -> None:
    """Replaces the tracker's cursor."""
    write_atomically(cursor_path(run_dir, kind), json.dumps(asdict(cursor)) + "\n")


def read_lines(path: Path, offset: int, most: int = BATCH_BYTES) -> tuple[list[Line], int]:
    """The whole lines after `offset`, up to `most` bytes or one longer line, and the offset of the next line."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        lines = [line for line in file.readlines(most) if line.endswith(b"\n")]
        return [json.loads(line) for line in lines], offset + sum(map(len, lines))
    return [], offset


def points(line: Line) -> Iterator[Point]:
    """The points of a record for a tracker: one or none."""
    found = list(scalars(line))
    if found:
        axis = "sft_step" if line["kind"] == "sft" else "step" if "step" in line else "iteration"
        yield Point(axis, found[0][2], line["time"], {name: value for name, value, _ in found})


def run_tracker(config: BaseConfig, run_id: str, section: TrackerSection, stopping: Event) -> None:
    """Sends new records until `stopping` is set and all are sent. Raises the tracker's errors."""
    run_dir, kind = config.run_dir, section.kind
    folder = run_dir / "trackers" / kind
    folder.mkdir(parents=True, exist_ok=True)
    cursor = read_cursor(run_dir, kind, run_id)
    run = TrackedRun(run_id, config.name, config.model_dump(mode="json"), folder, cursor.tracker_id)
    tracker = open_tracker(section, run)
    cursor = Cursor(run_id, tracker.tracker_id, cursor.offset)
    write_cursor(run_dir, kind, cursor)
    while True:
        last = stopping.is_set()
        lines, offset = read_lines(run_dir / "metrics.jsonl", cursor.offset)
        for point in (point for line in lines if line.get("run") == run_id for point in points(line)):
            tracker.log(point)
        if offset > cursor.offset:
            cursor = Cursor(run_id, tracker.tracker_id, offset)
            write_cursor(run_dir, kind, cursor)
        elif last:
            tracker.close()
            return
        else:
            stopping.wait(POLL_SECONDS)
