"""The configuration with which a model directory is served without a run.

Invariant: an export of a run is served with that run's settings, that of a stage on the stage's device in its dtype and with its
day. Every other model is served with the defaults, within its own context.
"""

import json
import re
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.rundir.input_files import read_model_files
from polyreme.rundir.model_export import export_config, is_classifier, no_policy

_NOT_IN_NAME = re.compile(r"[^a-z0-9-]+")
_CONTEXT = 4096
"""Maximum tokens of prompt and response for a model without a run, unless its own context is shorter."""


def config_for_model(model_dir: Path) -> RunConfig:
    """A configuration whose `model`, `device` and `rollout` serve the directory. Its other sections are placeholders.

    Args:
        model_dir: a Hugging Face directory; RUN_DIR/hf/NAME is an export of a run or a stage.

    Raises:
        ConfigError: it has no model, or one that writes no text.
    """
    files = read_model_files(model_dir)
    fields = json.loads(files["config.json"])
    if is_classifier(fields):
        raise no_policy(model_dir)
    origin = export_config(model_dir)
    if isinstance(origin, RunConfig):
        return origin.model_copy(update={"model": origin.model.model_copy(update={"path": model_dir})})
    context = min(fields.get("max_position_embeddings") or _CONTEXT, _CONTEXT)
    stage = {} if origin is None else {"device": origin.device, "model": {"path": model_dir, "dtype": origin.model.dtype}}
    return RunConfig.model_validate(
        {
            "name": _NOT_IN_NAME.sub("-", model_dir.resolve().name.lower()).strip("-") or "model",
            "iterations": 1,
            "groups_per_iteration": 1,
            "group_size": 2,
            "model": {"path": model_dir},
            "data": {"train": model_dir, "max_prompt_tokens": context - 1, "date": origin and origin.data.date},
            "reward": {"rewards": [{"name": "length"}]},
            "rollout": {"max_new_tokens": 1, "max_model_len": context},
            "trainer": {"optimizer": {"lr": 1e-6}},
            **stage,
        }
    )
