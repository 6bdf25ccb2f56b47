"""SwanLab.

Invariant: online, a run continues under its id; offline, SwanLab has no resume, and each start writes a separate folder.
"""

from polyreme.config.trackers import SwanlabConfig
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun


class SwanlabTracker:
    """A run of SwanLab."""

    def __init__(self, section: SwanlabConfig, run: TrackedRun) -> None:
        import swanlab

        again = {"id": run.tracker_id, "resume": "must"} if section.mode == "online" and run.tracker_id else {}
        self._run = swanlab.init(
            workspace=section.workspace,
            project=section.project,
            mode=section.mode,
            name=run.name,
            log_dir=str(run.folder),
            config=dict(run.config),
            **again,
        )
        self.tracker_id = str(self._run.id)

    def log(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


connect = SwanlabTracker
