"""The rows of NeMo Gym's data, as rows of a run's data.

Invariant: a row has its own whole, in the column `task`, as the agent gets it. `prompt` is only what the run shows of it.
"""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from polyreme.config.environment import EnvironmentConfig
from polyreme.dataset.text_files import Fields
from polyreme.errors import ConfigError
from polyreme_environment.nemo_gym.servers import read_file, site_packages

_TYPES = ("train", "example")
"""Types of their data sets, the preferred one first."""


def read_rows(config: EnvironmentConfig, count: int) -> list[dict[str, object]]:
    """At most `count` first rows of the agent's data set for training, or if it has none of its example. Raises ConfigError."""
    assert config.venv is not None and config.nemo_gym is not None
    site = site_packages(config.venv)
    sets = _data_sets(read_file(site, config.nemo_gym))
    own = Path(config.nemo_gym).parent
    found = [
        Path(at, str(each.get("jsonl_fpath")))
        for kind in _TYPES
        for each in sets
        if each.get("type") == kind
        for at in (site, own)
    ]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        listed = [str(each) for each in found]
        raise ConfigError(f"a data set of {config.nemo_gym} that is there", f"{listed}", "Get it as its environment says.")
    with path.open() as lines:
        return [row(json.loads(line), number) for number, line in enumerate(islice(lines, count))]


def _data_sets(tree: Mapping[str, object]) -> list[Mapping[str, object]]:
    sections = [section.get("responses_api_agents") or {} for section in tree.values() if isinstance(section, Mapping)]
    return [each for agents in sections for settings in agents.values() for each in (settings or {}).get("datasets") or ()]


def row(task: Fields, number: int) -> dict[str, object]:
    """The row of a row of theirs."""
    given = (task.get("responses_create_params") or {}).get("input")
    said = [given] if isinstance(given, str) else [each.get("content") for each in given or () if each.get("role") == "user"]
    shown = said[-1] if said and isinstance(said[-1], str) and said[-1] else f"task {number}"
    return {"prompt": shown, "task": dict(task)}
