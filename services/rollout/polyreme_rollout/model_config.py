"""The configuration with which a model directory is served without a run.

Invariant: an export of a run is served with that run's settings. Any other model is served with the defaults, within its own context; that
of a stage shows the stage's day.
"""

import json
import re
from pathlib import Path

from polyreme.cli.input_files import read_model_files
from polyreme.config.load import load_any
from polyreme.config.run import RunConfig

_NOT_IN_NAME = re.compile(r"[^a-z0-9-]+")
_CONTEXT = 4096
"""Maximum tokens of prompt and response for a model without a run, unless its own context is shorter."""


def config_for_model(model_dir: Path) -> RunConfig:
    """A configuration whose `model`, `device` and `rollout` serve the directory. Its other sections are placeholders.

    Args:
        model_dir: a Hugging Face directory; RUN_DIR/hf/NAME is an export of a run.

    Raises:
        ConfigError: it has no model.
    """
    files = read_model_files(model_dir)
    run_config = model_dir.resolve().parent.parent / "config.yaml"
    config = load_any(run_config) if model_dir.resolve().parent.name == "hf" and run_config.is_file() else None
    if isinstance(config, RunConfig):
        return config.model_copy(update={"model": config.model.model_copy(update={"path": model_dir})})
    context = min(json.loads(files["config.json"]).get("max_position_embeddings") or _CONTEXT, _CONTEXT)
    return RunConfig.model_validate(
        {
            "name": _NOT_IN_NAME.sub("-", model_dir.resolve().name.lower()).strip("-") or "model",
            "iterations": 1,
            "groups_per_iteration": 1,
            "group_size": 2,
            "model": {"path": model_dir},
            "data": {"train": model_dir, "max_prompt_tokens": context - 1, "date": config and config.data.date},
            "reward": {"rewards": [{"name": "length"}]},
            "rollout": {"max_new_tokens": 1, "max_model_len": context},
            "trainer": {"optimizer": {"lr": 1e-6}},
        }
    )
