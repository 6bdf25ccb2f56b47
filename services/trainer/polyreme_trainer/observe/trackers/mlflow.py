"""MLflow.

Invariant: parameters are those of the run's first start, since MLflow refuses to change one.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from posixpath import normpath
from typing import TYPE_CHECKING

from polyreme.config.trackers import MlflowConfig
from polyreme_trainer.observe.trackers.protocol import Point, TrackedRun

if TYPE_CHECKING:
    from mlflow.entities import Param

_BATCH = 100
"""Maximum number of parameters in one call of MLflow."""
_REFUSED = re.compile(r"[^\w.\-: /]")
_LONGEST_NAME = 250
_LONGEST = 6000
"""Maximum characters of a parameter's value."""


class MlflowTracker:
    """A run of MLflow in the experiment that `project` names."""

    def __init__(self, section: MlflowConfig, run: TrackedRun) -> None:
        if section.uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required since 3.7
        import mlflow.entities
        from mlflow import MlflowClient

        self._metric = mlflow.entities.Metric
        self._client = MlflowClient(tracking_uri=section.uri or run.folder.resolve().as_uri())
        self.tracker_id = run.tracker_id or self._create(section.project, run, mlflow.entities.Param)
        self._client.update_run(self.tracker_id, status="RUNNING")

    def log(self, point: Point) -> None:
        milliseconds, names = int(point.time * 1000), metric_names(point.values)
        metrics = [self._metric(names[name], value, milliseconds, point.step) for name, value in point.values.items()]
        self._client.log_batch(self.tracker_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.tracker_id)

    def _create(self, project: str, run: TrackedRun, param: "Callable[[str, str], Param]") -> str:
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        tracker_id: str = self._client.create_run(experiment, run_name=run.name, tags={"polyreme.run": run.run_id}).info.run_id
        params = [param(key, value[:_LONGEST]) for key, value in flat(run.config)]
        for start in range(0, len(params), _BATCH):
            self._client.log_batch(tracker_id, params=params[start : start + _BATCH])
        return tracker_id


def metric_names(names: Iterable[str]) -> dict[str, str]:
    """The names that MLflow takes, by ours: a metric may not be below another one in its store of files, as those of a reward's
    parts are."""
    found, known = {}, list(names)
    for name in known:
        parent = next((f"{each}/" for each in known if name.startswith(f"{each}/")), "")
        taken = _REFUSED.sub(
            "_", parent[:-1] + "." * bool(parent) + name.removeprefix(parent).replace("/", "." if parent else "/")
        )
        found[name] = (taken if normpath(taken) == taken else taken.replace("/", "_"))[:_LONGEST_NAME]
    return found


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


connect = MlflowTracker
