"""The numbers of records that can be plotted, with their names and steps. Trackers, TensorBoard and the run page show the same numbers."""

import math
from collections.abc import Iterator
from typing import Any

from polyreme.rundir.progress import Record, evaluation_metrics, number_of, stage_metrics

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


def scalars(line: Record) -> Iterator[tuple[str, float, int]]:
    """The scalars of a record: (tag, value, step). A step is an iteration, a version, or an optimizer step of a warm start or a stage."""
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
        case "saved" if "seconds" in line:
            for key in sorted({"seconds", "stall_seconds"} & line.keys()):
                yield f"checkpoint/{key}", float(line[key]), number_of(line)
        case "step" | "eval" if "step" in line:
            group = "train" if line["kind"] == "step" else "eval"
            for key in stage_metrics(line):
                if is_number(line[key]):
                    yield f"{group}/{key}", float(line[key]), line["step"]
        case "sft":
            yield f"sft_{line['phase']}/loss", line["loss"], line["step"]


def is_number(value: Any) -> bool:
    """Whether a record's value can be plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
