"""`polyreme compare`: the configurations and the metrics of several runs side by side.

Invariant: metrics are compared over the iterations that every run has trained, so the comparison with a run in progress ends at
that run's newest iteration.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError
from polyreme.experience.metric_records import Line
from polyreme.rundir.run_directory import flat_settings, no_run, read_run_file, read_settings
from polyreme.rundir.run_records import read_records, read_summary
from polyreme.terminal.terminal import TerminalConsole, fitted

MAIN = (
    "reward/mean",
    "reward/std",
    "response_length/mean",
    "entropy",
    "actor/kl_loss",
    "reward_kl",
    "mismatch_kl",
    "grad_norm",
    "tokens_per_second",
    "time/iteration",
    "time/learner_wait",
    "time/train",
)
"""The metrics that are shown without --all."""
STAGE_MAIN = ("loss", "accuracy", "rewards/accuracies", "rewards/margins", "grad_norm", "lr", "tokens_per_second", "time/step")
"""The same for stages."""
_RESULTS = ("state", "rl_seconds", "samples_per_second", "step", "loss", "step_seconds")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    last: Annotated[int, typer.Option(min=1, help="Number of newest common iterations to average.")] = 10,
    everything: Annotated[bool, typer.Option("--all", help="Show every metric, not only the main ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs: keys of the configuration that differ, results, and metrics over the same iterations."""
    if len(runs) < 2:
        raise ConfigError("two run directories or more", "one", "Pass the directories of the runs to compare.")
    histories = [_iterations(run_dir) for run_dir in runs]
    first, newest = common_iterations(histories, last)
    spans = [(first, newest)] * len(runs) if newest else [common_iterations([history], last) for history in histories]
    metrics = metric_rows(histories, spans, None if everything else (*MAIN, *(name for name in STAGE_MAIN if name not in MAIN)))
    summaries = [read_summary(run_dir) for run_dir in runs]
    results = result_rows(summaries)
    evaluations = summary_rows([summary.get("newest_evaluation") or {} for summary in summaries])
    settings = settings_rows([read_settings(run_dir) for run_dir in runs])
    console = TerminalConsole(sys.stdout)
    if as_json:
        fields = {
            "config": settings,
            "results": results,
            "evaluations": evaluations,
            "iterations": [first, newest],
            "own_iterations": spans,
            "metrics": metrics,
        }
        console.print(json.dumps({"runs": list(map(str, runs)), **fields}), soft_wrap=True)
        return
    names = [run_dir.resolve().name for run_dir in runs]
    names = names if len(set(names)) == len(names) else list(map(str, runs))
    width = console.table_width
    lines = [*_table("CONFIGURATION", names, settings, width), "", *_table("RESULT", names, results, width)]
    if evaluations:
        lines += ["", *_table("NEWEST EVALUATION", names, evaluations, width)]
    if metrics:
        shown = f"{first} TO {newest}" if newest else ", ".join(f"{low} TO {high}" for low, high in spans)
        lines += (
            []
            if newest
            else ["", "The runs have no iteration in common, as a fork and its parent: each has its own newest ones."]
        )
        lines += ["", *_table(f"MEAN OF {_unit(histories)} {shown}", names, metrics, width)]
    console.print("\n".join(lines), soft_wrap=True)


def common_iterations(histories: Sequence[Sequence[Line]], last: int) -> tuple[int, int]:
    """The first and the newest of the `last` newest iterations that every run has trained; (0, 0) when there are none."""
    numbers = [{record["iteration"] for record in history} for history in histories]
    common = sorted(set.intersection(*numbers))[-last:]
    return (common[0], common[-1]) if common else (0, 0)


def metric_rows(
    histories: Sequence[Sequence[Line]], spans: Sequence[tuple[int, int]], names: Sequence[str] | None = None
) -> dict[str, list[float | None]]:
    """Means over some iterations, by metric, one value per run; None for a run that does not record the metric.

    Args:
        histories: the `iteration` records of each run, or a stage's `step` records.
        spans: the first and the last iteration of each run.
        names: metrics in the order wanted, or None for every number that a run records.
    """
    chosen = [
        [record for record in history if first <= record["iteration"] <= newest]
        for history, (first, newest) in zip(histories, spans, strict=True)
    ]
    if names is None:
        recorded = {name for history in chosen for record in history for name in record}
        names = sorted(recorded - {"iteration", "step", "steps", "time", "next_group"})
    rows = {name: [_mean(record.get(name) for record in history) for history in chosen] for name in names}
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def result_rows(summaries: Sequence[Line]) -> dict[str, list[object]]:
    """Results in the runs' summaries, by name: the state, the metric of the best version before and after training, the speed."""
    rows = summary_rows([flat_settings(summary) for summary in summaries])
    decided = [
        name for name in rows if name.partition(".")[0].endswith(("_before", "_after")) or name.endswith(("_before", "_after"))
    ]
    return {name: rows[name] for name in (_RESULTS[0], *decided, *_RESULTS[1:]) if name in rows}


def summary_rows(summaries: Sequence[Line]) -> dict[str, list[object]]:
    """The values by name, one per run; None for a run without it. Names without any value are omitted."""
    names = dict.fromkeys(name for summary in summaries for name in summary)
    rows = {name: [summary.get(name) for summary in summaries] for name in names}
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def settings_rows(settings: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """The dotted keys whose values differ between the runs, sorted, with one value per run; None for a key that is missing."""
    flat = [flat_settings(each) for each in settings]
    keys = sorted(set().union(*flat))
    rows = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _unit(histories: Sequence[Sequence[Line]]) -> str:
    return "STEPS" if all(record["kind"] == "step" for history in histories for record in history) else "ITERATIONS"


def _iterations(run_dir: Path) -> list[Line]:
    """The `iteration` records of a run, each iteration once; the `step` records of a stage, with the step as `iteration`."""
    found = read_run_file(run_dir)
    if found is None:
        raise no_run(run_dir)
    newest = 0
    records = []
    for record in read_records(run_dir, found.run_id):
        if record["kind"] in ("iteration", "step") and (number := record[record["kind"]]) > newest:
            newest = number
            records.append({**record, "iteration": number})
    return records


def _mean(values: Iterable[object]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[object]], width: int | None) -> list[str]:
    if not rows:
        return [f"{title}: no difference"]
    return fitted((title, *names), [(key, *map(_cell, values)) for key, values in rows.items()], width)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
