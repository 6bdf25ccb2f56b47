"""`polyreme compare`: the configurations and the metrics of several runs side by side.

Invariant: metrics are compared over the iterations that every run has trained, so the comparison with a run in progress ends at that
run's newest iteration.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.cli.run_directory import flat_settings, no_run, read_run_file, read_settings
from polyreme.cli.run_records import read_records, read_summary
from polyreme.cli.table import fitted
from polyreme.cli.terminal import TerminalConsole
from polyreme.errors import ConfigError

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
_RESULTS = ("state", "rl_seconds", "samples_per_second")

Record = Mapping[str, Any]


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
    metrics = metric_rows(histories, first, newest, None if everything else MAIN)
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
            "metrics": metrics,
        }
        console.print(json.dumps({"runs": list(map(str, runs)), **fields}), soft_wrap=True)
        return
    names = [run_dir.name for run_dir in runs] if len({run_dir.name for run_dir in runs}) == len(runs) else list(map(str, runs))
    width = console.table_width
    lines = [*_table("CONFIGURATION", names, settings, width), "", *_table("RESULT", names, results, width)]
    if evaluations:
        lines += ["", *_table("NEWEST EVALUATION", names, evaluations, width)]
    if metrics:
        title = f"MEAN OF ITERATIONS {first} TO {newest}"
        lines += ["", *_table(title, names, metrics, width)]
    console.print("\n".join(lines), soft_wrap=True)


def common_iterations(histories: Sequence[Sequence[Record]], last: int) -> tuple[int, int]:
    """The first and the newest of the `last` newest iterations that every run has trained; (0, 0) when there are none."""
    numbers = [{record["iteration"] for record in history} for history in histories]
    common = sorted(set.intersection(*numbers))[-last:]
    return (common[0], common[-1]) if common else (0, 0)


def metric_rows(
    histories: Sequence[Sequence[Record]], first: int, newest: int, names: Sequence[str] | None = None
) -> dict[str, list[float | None]]:
    """Means over the iterations `first` to `newest`, by metric, one value per run; None for a run that does not record the metric.

    Args:
        histories: the `iteration` records of each run.
        first, newest: the iterations.
        names: metrics in the order wanted, or None for every number that a run records.
    """
    chosen = [[record for record in history if first <= record["iteration"] <= newest] for history in histories]
    if names is None:
        recorded = {name for history in chosen for record in history for name in record}
        names = sorted(recorded - {"iteration", "time", "next_group"})
    rows = {name: [_mean(record.get(name) for record in history) for history in chosen] for name in names}
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def result_rows(summaries: Sequence[Record]) -> dict[str, list[Any]]:
    """The results in the runs' summaries, by name: the state, the metric of the best version before and after training, the speed."""
    rows = summary_rows(summaries)
    decided = [name for name in rows if name.endswith(("_before", "_after"))]
    return {name: rows[name] for name in (_RESULTS[0], *decided, *_RESULTS[1:]) if name in rows}


def summary_rows(summaries: Sequence[Record]) -> dict[str, list[Any]]:
    """The values by name, one per run; None for a run without it. Names without any value are omitted."""
    names = dict.fromkeys(name for summary in summaries for name in summary)
    rows = {name: [summary.get(name) for summary in summaries] for name in names}
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def settings_rows(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys whose values differ between the runs, sorted, with one value per run; None for a key that is missing."""
    flat = [flat_settings(each) for each in settings]
    keys = sorted(set().union(*flat))
    rows = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _iterations(run_dir: Path) -> list[dict[str, Any]]:
    found = read_run_file(run_dir)
    if found is None:
        raise no_run(run_dir)
    newest = 0
    records = []
    for record in read_records(run_dir, found.run_id):
        if record["kind"] == "iteration" and record["iteration"] > newest:
            newest = record["iteration"]
            records.append(record)
    return records


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[Any]], width: int | None) -> list[str]:
    if not rows:
        return [f"{title}: no difference"]
    return fitted((title, *names), [(key, *map(_cell, values)) for key, values in rows.items()], width)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
