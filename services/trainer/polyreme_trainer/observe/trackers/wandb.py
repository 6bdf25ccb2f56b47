"""Weights & Biases.

Invariant: each metric has its axis as step metric, so points may come in any order.
"""

from polyreme.config.trackers import WandbConfig
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun


class WandbTracker:
    """A run of Weights & Biases, under Polyreme's run id. Offline, each start writes a separate folder with that id."""

    def __init__(self, section: WandbConfig, run: TrackedRun) -> None:
        import wandb

        self.tracker_id = run.run_id
        self._defined: set[str] = set()
        self._run = wandb.init(
            entity=section.entity,
            project=section.project,
            mode=section.mode,
            id=self.tracker_id,
            name=run.name,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )

    def log(self, point: Point) -> None:
        for name in point.values.keys() - self._defined:
            self._run.define_metric(name, step_metric=point.axis)
            self._defined.add(name)
        self._run.log({**point.values, point.axis: point.step})

    def close(self) -> None:
        self._run.finish()


connect = WandbTracker
