"""The numbers of records that can be plotted, with their names and steps. Trackers, TensorBoard and the run page show the same numbers."""

import math
from collections.abc import Iterator
from typing import Any

from polyreme.rundir.progress import Record, evaluation_metrics

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
_NO_METRICS = ("step", "steps", "time", "rows", "seconds")


def scalars(line: Record) -> Iterator[tuple[str, float, int]]:
    """The scalars of a run's record: (tag, value, step). A step is an iteration, a version, or an optimizer step of a warm start."""
    match line["kind"]:
        case "iteration":
            step = line["iteration"]
            for key, value in line.items():
                if key not in ("iteration", "time") and is_number(value):
                    yield key, float(value), step
                elif key == "staleness/samples":
                    yield from ((f"{key}_{staleness}", float(count), step) for staleness, count in enumerate(value))
        case "rollout":
            numbers = ((key, value) for key, value in line.items() if key not in ("iteration", "time") and is_number(value))
            yield from ((key, float(value), line["iteration"]) for key, value in numbers)
        case "eval" if "version" in line:
            yield from ((name, value, line["version"]) for name, value in evaluation_metrics(line).items())
        case "commit":
            for key in sorted(COMMIT_METRICS & line.keys()):
                yield f"weights/{key}", float(line[key]), line["version"]
        case "saved" if "seconds" in line and "iteration" in line:
            for key in sorted({"seconds", "stall_seconds"} & line.keys()):
                yield f"checkpoint/{key}", float(line[key]), line["iteration"]
        case "sft":
            yield f"sft_{line['phase']}/loss", line["loss"], line["step"]


def stage_scalars(line: Record) -> Iterator[tuple[str, float, int]]:
    """The scalars of a stage's record: (tag, value, step)."""
    if line["kind"] == "saved" and "step" in line:  # a run's has an iteration
        yield from ((f"checkpoint/{key}", float(line[key]), line["step"]) for key in ("seconds", "stall_seconds") if key in line)
    group = {"step": "train", "eval": "eval"}.get(line["kind"])
    if group is not None and "step" in line:
        for name, value in line.items():
            if name not in _NO_METRICS and is_number(value):
                yield f"{group}/{name}", float(value), line["step"]


def is_number(value: Any) -> bool:
    """Whether a record's value can be plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
