"""Trackio.

Invariant: the tracker's run has Polyreme's run id as its name: Trackio continues runs by name.
"""

import os

from polyreme.config.trackers import TrackioConfig
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun


class TrackioTracker:
    """A run of Trackio, grouped with others of its name."""

    def __init__(self, section: TrackioConfig, run: TrackedRun) -> None:
        if section.space is None:
            os.environ["TRACKIO_DIR"] = str(section.directory or run.folder)  # it reads this when it is imported
        import trackio

        self.tracker_id = run.run_id
        self._run = trackio.init(
            project=section.project,
            name=self.tracker_id,
            group=run.name,
            space_id=section.space,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


connect = TrackioTracker
