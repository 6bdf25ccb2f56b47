"""The protocol of a tracker, which takes points of named numbers and can continue a run that it started.

Invariant: a tracker's package is imported only when the tracker is opened, so a run needs only the packages of its own trackers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from polyreme.config.trackers import PluginConfig, TrackerSection
from polyreme.errors import ConfigError

GROUP = "polyreme.trackers"
"""The entry points of other packages' trackers. Each is a function `connect(section, run)`, as that of a module in TRACKERS."""
TRACKERS = {
    "wandb": "polyreme_trainer.observe.trackers.wandb",
    "swanlab": "polyreme_trainer.observe.trackers.swanlab",
    "mlflow": "polyreme_trainer.observe.trackers.mlflow",
    "trackio": "polyreme_trainer.observe.trackers.trackio",
}
"""The module of each kind. Its `connect(section, run)` returns a Tracker."""


@dataclass(frozen=True)
class TrackedRun:
    """The run, as trackers need it.

    Attributes:
        run_id, name: Polyreme's id and name of the run.
        config: the resolved configuration, as plain values.
        folder: an existing directory for the tracker's files.
        tracker_id: this tracker's id of the run; None for a new run.
    """

    run_id: str
    name: str
    config: Mapping[str, object]
    folder: Path
    tracker_id: str | None


@dataclass(frozen=True)
class Point:
    """Numbers of one step.

    Attributes:
        axis: the unit of the step: `iteration`, `sft_step` in a warm start, or `step` in a stage.
        time: Unix seconds.
        values: name -> number.
    """

    axis: str
    step: int
    time: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """An open run of a tracker. An exception in its methods is a failure of the tracker and ends its process."""

    @property
    def tracker_id(self) -> str:
        """The tracker's id of the run, with which the run can be continued."""

    def log(self, point: Point) -> None:
        """Records a point. Steps of one axis may repeat or decrease, since an evaluation may end after later iterations."""

    def close(self) -> None:
        """Sends the remaining points and closes the run."""


def open_tracker(section: TrackerSection, run: TrackedRun) -> Tracker:
    """Starts or continues the tracker's run. Raises the errors of its package."""
    if isinstance(section, PluginConfig):
        connect = next(iter(entry_points(group=GROUP, name=section.name))).load()
    else:
        connect = import_module(TRACKERS[section.kind]).connect
    tracker: Tracker = connect(section, run)
    return tracker


def check_trackers(sections: Sequence[TrackerSection]) -> Iterator[ConfigError]:
    """An error for each tracker whose package is not installed here. Imports none of them."""
    for section in sections:
        if isinstance(section, PluginConfig):
            installed = {point.name for point in entry_points(group=GROUP)}
            if section.name not in installed:
                yield ConfigError(
                    f"a tracker {section.name} among the entry points {GROUP}",
                    ", ".join(sorted(installed)) or "none",
                    "Install the package that has it where the trainer runs, or fix trackers[].name.",
                )
        elif find_spec(section.module) is None:
            yield ConfigError(
                f"the package {section.package}, which the tracker {section.kind} needs",
                "none that Python finds here",
                f"Install it where the trainer runs: pip install {section.package}",
            )
