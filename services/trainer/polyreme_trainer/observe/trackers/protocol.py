"""What a tracker is: something that takes points of named numbers, and continues the run that it began.

Invariant: a tracker's package is imported when a tracker is opened, and nowhere else, so a run needs the packages of its own trackers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from polyreme.config.trackers import TrackerSection

TRACKERS = {
    "wandb": "polyreme_trainer.observe.trackers.wandb",
    "swanlab": "polyreme_trainer.observe.trackers.swanlab",
    "mlflow": "polyreme_trainer.observe.trackers.mlflow",
    "trackio": "polyreme_trainer.observe.trackers.trackio",
}
"""The module of each kind. It has `connect(section, run)`, which gives a Tracker."""


@dataclass(frozen=True)
class TrackedRun:
    """The run as its trackers know it.

    Attributes:
        run_id, name: Polyreme's.
        config: the resolved configuration, as plain values.
        folder: where the tracker may keep files; it exists.
        tracker_id: what this tracker called the run when it began; None: it begins now.
    """

    run_id: str
    name: str
    config: Mapping[str, Any]
    folder: Path
    tracker_id: str | None


@dataclass(frozen=True)
class Point:
    """Numbers that belong together.

    Attributes:
        axis: what the step counts: `iteration`, or `sft_step` in a warm start.
        time: Unix seconds.
        values: name -> number.
    """

    axis: str
    step: int
    time: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """An open run of a tracker. Any exception of its methods is a failure of the tracker, which ends its process."""

    @property
    def tracker_id(self) -> str:
        """The tracker's id of the run, with which it is continued."""
        ...

    def log(self, point: Point) -> None:
        """Takes a point. Steps of one axis may repeat and go back: an evaluation may end after later iterations."""
        ...

    def close(self) -> None:
        """Delivers what is left."""
        ...


def open_tracker(section: TrackerSection, run: TrackedRun) -> Tracker:
    """Begins or continues the tracker's run. Raises whatever its package raises."""
    tracker: Tracker = import_module(TRACKERS[section.kind]).connect(section, run)
    return tracker
