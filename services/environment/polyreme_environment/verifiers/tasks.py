"""Writes the tasks of an environment of verifiers as a run's data.

Invariant: a row has its task whole, in the column `task`, as the env server gets it. `prompt` is only what the run shows of it.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme.isolation.privacy import scrubbed
from polyreme.rundir.run_records import write_atomically
from polyreme_environment.verifiers.programs import TASKS, configuration

_TOLD = 1500
"""Characters of the package's last output in an error."""


def write_tasks(config: EnvironmentConfig, out: Path, count: int) -> int:
    """Writes at most `count` rows to a new file. Returns their number. Raises ConfigError."""
    if config.verifiers is None or config.venv is None:
        raise ConfigError("an environment of verifiers", "another one", "Set environment.verifiers and environment.venv.")
    if out.exists():
        raise ConfigError(f"a new file at {out}", "one that exists", "Move it away, or fix data.train.")
    with TemporaryDirectory() as folder:
        found = Path(folder, "tasks.jsonl")
        command = [str(config.venv / "bin" / "python"), "-c", TASKS, configuration(config), str(found), str(count)]
        try:
            done = subprocess.run(
                command, env=scrubbed(os.environ, config.worker_environment), capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            raise ConfigError(f"a virtual environment at {config.venv}", str(error), "Fix environment.venv.") from None
        if done.returncode:
            raise ConfigError(f"tasks of {config.verifiers}", done.stderr.strip()[-_TOLD:], "See its message.")
        rows = [row(json.loads(line)) for line in found.read_text().splitlines()]
    if not rows:
        raise ConfigError(f"tasks of {config.verifiers}", "none", "Choose another environment, or fix environment.options.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(json.dumps(each) + "\n" for each in rows))
    return len(rows)


def row(task: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a task."""
    prompt = task.get("prompt")
    shown = prompt if isinstance(prompt, str) and prompt else task.get("name") or f"task {task.get('idx')}"
    return {"prompt": shown, "task": dict(task)}
