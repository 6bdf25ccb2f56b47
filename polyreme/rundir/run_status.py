"""The status of a run in one line, from its directory or from its Redis.

Invariant: reading a status changes no run and reads only a run's small files, so that a folder of many runs is listed quickly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polyreme.experience.listing import ListedRun
from polyreme.experience.metric_records import Line
from polyreme.experience.run import ENDED
from polyreme.rundir.progress import Progress, stream_time
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import NO_REDIS, RunFile, Settings, read_run_file


@dataclass(frozen=True)
class RunStatus:
    """A run or a stage at one moment.

    Attributes:
        run_id: id of the run.
        place: its run directory, or the URL of its Redis.
        state: a RunState, a state of a newer release, or `interrupted`: its processes ended without setting a final state.
        reason: reason for the state, or for a run that is done that it has learned nothing, or what a run waits for; else ''.
        iteration, iterations: the newest trained iteration (of a stage: step) and the configured number; None when it is unknown.
        replayed: while the iterations (of a stage: steps) after the newest checkpoint are repeated after a resume, the newest
            that is; else None.
        metric, value: name and value of the newest evaluation (of a stage: the loss); '' and None without one.
        reward: mean reward of the newest iteration, or None.
        replicas: served version by replica, for the live ones; None while a replica has none.
        orchestrators: of several by name, see `Progress.orchestrators`.
        updated: Unix time in seconds of the newest record, or None.
    """

    run_id: str
    place: str
    state: str
    reason: str = ""
    iteration: int | None = None
    iterations: int | None = None
    replayed: int | None = None
    metric: str = ""
    value: float | None = None
    reward: float | None = None
    replicas: Mapping[str, int | None] = field(default_factory=dict)
    orchestrators: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    updated: float | None = None

    @property
    def ended(self) -> bool:
        """Whether no process of the run is running."""
        return self.state in ("interrupted", *ENDED)


def directory_status(run_dir: Path) -> RunStatus:
    """The status of the directory's run or stage. Raises ConfigError when the directory has none."""
    reader, found = RunReader(run_dir), read_run_file(run_dir)
    assert found is not None  # RunReader raises otherwise
    summary, settings = reader.summary(), reader.config()
    status = _stage_status if found.redis == NO_REDIS else _run_status
    return status(RunStatus(found.run_id, str(run_dir), summary["state"], summary["reason"]), found, summary, settings)


def redis_status(listed: ListedRun, url: str) -> RunStatus:
    """The status of a run from its Redis. `url`: URL of that Redis, without a password."""
    progress = Progress(1)
    for record in listed.records:
        progress.add({"time": stream_time(record["id"]), **record})
    return RunStatus(
        run_id=listed.run_id,
        place=url,
        state=listed.state,
        reason=listed.reason or ("" if listed.state in ENDED else progress.waiting),
        iteration=listed.iteration,
        iterations=listed.iterations,
        replayed=progress.replayed,
        metric=progress.metric if progress.evaluations else "",
        value=progress.score(),
        reward=progress.last.metrics["reward/mean"] if progress.last else None,
        replicas={name: progress.versions.get(name) for name in listed.replicas},
        orchestrators={} if listed.state in ENDED else progress.orchestrators(),
        updated=progress.time or None,
    )


def _run_status(status: RunStatus, found: RunFile, summary: Line, settings: Settings) -> RunStatus:
    evaluations = {int(version): value for version, value in summary.get("evaluations", {}).items()}
    versions = summary.get("versions", {})
    metric = next((name.removesuffix("_before") for name in summary if name.endswith("_before")), "")
    nothing = summary.get("not_learned") if status.ended else None
    return replace(
        status,
        reason=status.reason or (nothing[0] if nothing else "" if status.ended else summary.get("waiting", "")),
        iteration=summary.get("iteration", summary.get("iterations")),
        iterations=settings.get("iterations"),
        replayed=None if status.ended else summary.get("replayed"),
        metric=metric if evaluations else "",
        value=evaluations[max(evaluations)] if evaluations else None,
        reward=summary.get("reward"),
        replicas={} if status.ended else {name: versions.get(name) for name in sorted(found.replicas)},
        orchestrators={} if status.ended else summary.get("orchestrators", {}),
        updated=summary.get("updated"),
    )


def _stage_status(status: RunStatus, found: RunFile, summary: Line, settings: Settings) -> RunStatus:
    loss = summary.get("loss")
    return replace(
        status,
        iteration=summary.get("step"),
        iterations=summary.get("steps"),
        replayed=None if status.ended else summary.get("replayed"),
        metric="" if loss is None else "loss",
        value=loss,
        updated=summary.get("updated"),
    )
