"""A TensorBoard event file.

Invariant: every write is flushed at once, so that a full disk raises OSError where it is handled.
"""

import socket
import sys
import time
from importlib import import_module
from pathlib import Path

from polyreme.experience.metric_records import Line
from polyreme.rundir.reader.scalars import scalars


def import_tensorboard() -> None:
    """Imports tensorboardX without torch, when this process has not imported torch already.

    tensorboardX needs torch only to recognise its tensors. The import costs the supervisor seconds and 200 MB.
    """
    if "torch" in sys.modules:
        import_module("tensorboardX")
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        import_module("tensorboardX")
    finally:
        del sys.modules["torch"]


class Board:
    """A TensorBoard event file. tensorboardX's SummaryWriter is not used: it writes in a thread, which dies silently when the
    disk is full, and the next caller then blocks on its queue."""

    def __init__(self, folder: Path) -> None:
        """Creates a file in the folder. Raises OSError."""
        import_tensorboard()
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._event, self._scalar = Event, scalar
        self._file = RecordWriter(str(folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}"))
        self._file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def add(self, lines: list[Line]) -> None:
        """Writes the scalars of lines of metrics.jsonl; they are on disk when it returns."""
        for line in lines:
            for tag, value, step in scalars(line):
                event = self._event(wall_time=line["time"], step=step, summary=self._scalar(tag, value))
                self._file.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
