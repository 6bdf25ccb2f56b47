"""The numbers of records that can be plotted, with their names and steps. Trackers, TensorBoard and the run page show these."""

import math
from collections.abc import Iterator

from polyreme.experience.metric_records import (
    CheckpointSaved,
    Evaluation,
    GroupsPlanned,
    IterationTrained,
    Line,
    MetricValues,
    StageEvaluation,
    StageStep,
    VersionServed,
    WarmStartStep,
    read_record,
)

COMMIT_METRICS = {
    "stall_seconds",
    "reload_seconds",
    "bytes",
    "relayed_bytes",
    "hops",
    "density",
    "encode_seconds",
    "apply_seconds",
    "canary_difference",
}


def scalars(line: Line) -> Iterator[tuple[str, float, int]]:
    """A record's scalars: (tag, value, step). A step is an iteration, version, or an optimizer step of a warm start or stage."""
    match read_record(line):
        case IterationTrained(iteration=step, metrics=metrics):
            for key, value in metrics.items():
                if is_number(value):
                    yield key, float(value), step
                elif key == "staleness/samples":
                    yield from ((f"{key}_{staleness}", float(count), step) for staleness, count in enumerate(value))
        case GroupsPlanned(iteration=step, metrics=metrics) | Evaluation(version=step, metrics=metrics):
            yield from _numbers("", metrics, step)
        case VersionServed(version=version, metrics=metrics):
            yield from _numbers("weights/", {key: metrics[key] for key in sorted(COMMIT_METRICS & metrics.keys())}, version)
        case CheckpointSaved(seconds=float() | int() as seconds) as saved:
            yield from _numbers("checkpoint/", {"seconds": seconds, "stall_seconds": saved.stall_seconds}, saved.number)
        case StageStep(step=step, metrics=metrics):
            yield from _numbers("train/", metrics, step)
        case StageEvaluation(step=step, metrics=metrics):
            yield from _numbers("eval/", metrics, step)
        case WarmStartStep(phase=phase, step=step, loss=loss):
            yield from _numbers(f"sft_{phase}/", {"loss": loss}, step)


def _numbers(prefix: str, metrics: MetricValues, step: int) -> Iterator[tuple[str, float, int]]:
    return ((prefix + name, float(value), step) for name, value in metrics.items() if is_number(value))


def is_number(value: object) -> bool:
    """Whether a record's value can be plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
