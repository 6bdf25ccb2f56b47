"""The tasks of an environment of verifiers, as rows of a run's data.

Invariant: a row has its task whole, in the column `task`, as the env server gets it. `prompt` is only what the run shows of it.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme.isolation.privacy import scrubbed
from polyreme_environment.verifiers.programs import TASKS, configuration

_TOLD = 1500
"""Characters of the package's last output in an error."""


def read_tasks(config: EnvironmentConfig, count: int) -> list[dict[str, object]]:
    """The rows of at most `count` tasks. Raises ConfigError."""
    assert config.venv is not None
    with TemporaryDirectory() as folder:
        found = Path(folder, "tasks.jsonl")
        command = [str(config.venv / "bin" / "python"), "-c", TASKS, configuration(config), str(found), str(count)]
        environment = scrubbed(os.environ, config.worker_environment)
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=config.start_timeout
            )
        except subprocess.TimeoutExpired:
            found_none = f"none of them within environment.start_timeout = {config.start_timeout:g} s"
            raise ConfigError(f"tasks of {config.verifiers}", found_none, "Raise it if they are downloaded first.") from None
        except OSError as error:
            raise ConfigError(f"a virtual environment at {config.venv}", str(error), "Fix environment.venv.") from None
        if done.returncode:
            raise ConfigError(f"tasks of {config.verifiers}", done.stderr.strip()[-_TOLD:], "See its message.")
        return [row(json.loads(line)) for line in found.read_text().splitlines()]


def row(task: Mapping[str, object]) -> dict[str, object]:
    """The row of a task."""
    prompt = task.get("prompt")
    shown = prompt if isinstance(prompt, str) and prompt else task.get("name") or f"task {task.get('idx')}"
    return {"prompt": shown, "task": dict(task)}
