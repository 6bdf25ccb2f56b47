"""The day that a run's chat template shows (`data.date`).

Invariant: it is decided once, when the run starts, and is part of its configuration from then on. So prompts stay the same after
a resume on another day, in the replicas' /v1, in evaluations and in a fork.
"""

import datetime
import re
from pathlib import Path
from typing import TypeVar

from polyreme.config.load import load_any
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.config.yaml_text import load_yaml

Config = TypeVar("Config", RunConfig, StageConfig, RunConfig | StageConfig)

_STARTED = re.compile(r"-(\d{8})-\d{6}-[0-9a-f]+$")


def dated(config: Config, day: datetime.date | None) -> Config:
    """The configuration with this day, unless it names one."""
    if config.data.date is not None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"date": day})})


def first_day(run_dir: Path, run_id: str | None) -> datetime.date:
    """The day of the directory's run `run_id`; None: a new run, starting today. An older release recorded it only in the id."""
    today = datetime.date.today()
    if run_id is None:
        return today
    started = _STARTED.search(run_id)
    recorded = load_any(run_dir / "config.yaml").data.date
    return recorded or (datetime.datetime.strptime(started[1], "%Y%m%d").date() if started else today)


def day_of_export(model_dir: Path) -> datetime.date | None:
    """The day of the run or stage that exported a model directory (RUN_DIR/hf/NAME); None: no export, or no recorded day."""
    folder = model_dir.resolve().parent
    config = folder.parent / "config.yaml"
    if folder.name != "hf" or not config.is_file():
        return None
    tree = load_yaml(config.read_text(), str(config))
    day = tree.get("data", {}).get("date")
    return None if day is None else datetime.date.fromisoformat(str(day))
