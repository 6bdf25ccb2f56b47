"""`polyreme eval`: evaluates a model as a run would, without training.

Invariant: the answers come from the replicas, the template and the rewards of the configuration, as in training. The evaluation's
run directory keeps the records and the answers, but not the copies of the model.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from polyreme.cli.commands.up import train
from polyreme.config.load import load_config
from polyreme.errors import RunFailedError
from polyreme.experience.metric_records import Evaluation, read_record
from polyreme.net.redis_url import redis_option
from polyreme.rundir.run_records import read_records
from polyreme.rundir.start import prepared
from polyreme.terminal.completion import Overrides
from polyreme.terminal.terminal import TerminalConsole, aligned

_ONLY_EVALUATE = (
    "iterations=0",
    "max_staleness=0",
    "rollout.tokens_per_iteration=null",
    "group_size=2",
    "algorithm={preset: dapo}",
    "trainer.critic={}",
    "teacher=null",
)
"""Nothing is trained, so the learner needs no reference, no critic and no teacher."""
_BESIDE = ("trainer.sft=[]", "trackers=[]", "notices=[]")


def evaluate(
    config: Annotated[Path, typer.Argument(help="The YAML file of a run with data.eval and reward.")],
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory or name. Default: the configuration's model.path.")
    ] = None,
    redis: Annotated[str | None, redis_option("Redis to use. Default: the evaluation's own.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object; progress goes to stderr.")
    ] = False,
) -> None:
    """Evaluate a model on a run's held-out prompts with its rewards, without training."""
    console = TerminalConsole(sys.stderr if as_json else sys.stdout)
    chosen = evaluation_overrides(config, overrides or [], model)
    with prepared(config, chosen, resume=False, fork=False) as start:
        run_dir = start.config.run_dir
        status = asyncio.run(train(start, redis, console))
    if status:
        raise typer.Exit(status)
    for copies in ("checkpoints", "hf"):
        shutil.rmtree(run_dir / copies, ignore_errors=True)
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    recorded = map(read_record, read_records(run_dir, run_id))
    found = [record for record in recorded if isinstance(record, Evaluation)]
    if not found:
        raise RunFailedError(
            "a result of the evaluation", "none", f"See {run_dir / 'metrics.jsonl'} and `polyreme logs {quote(str(run_dir))}`."
        )
    if as_json:
        print(json.dumps({"model": str(start.config.model.path), "run_dir": str(run_dir), **results(found[-1])}))
        return
    lines = aligned(("METRIC", "VALUE"), [(name, f"{value:.4g}") for name, value in results(found[-1]).items()])
    console.print("\n".join([*lines, f"answers  {run_dir / 'samples' / 'evaluation_0000.jsonl'}"]), soft_wrap=True)


def results(record: Evaluation) -> dict[str, object]:
    """The metrics of an evaluation by name: its mean, the metrics over several answers, the prompts, the mean of each reward."""
    rewards = {f"reward/{name}": value for name, value in record.parts.items()}
    return {**record.metrics, "samples": record.samples, **rewards}


def evaluation_overrides(config: Path, overrides: list[str], model: Path | None) -> list[str]:
    """The overrides of a run that only evaluates, in another directory. Raises ConfigError when the configuration is invalid."""
    chosen = [*overrides, *([] if model is None else [f"model.path={json.dumps(str(model))}"])]
    chosen += [*_ONLY_EVALUATE, *_BESIDE]
    base = load_config(config, chosen)
    number = 1
    while (base.output_dir / f"{base.name}-eval-{number}").exists():
        number += 1
    return [*chosen, f"name={base.name}-eval-{number}"]
