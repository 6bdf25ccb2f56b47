"""Small run configurations for tests."""

from pathlib import Path
from typing import Any

from polyreme.config.run import RunConfig


def run_config(folder: Path, **changes: Any) -> RunConfig:
    """A valid configuration whose paths lie in `folder` (nothing is read from them); `changes` replace top-level fields, unchecked."""
    config = RunConfig.model_validate(
        {
            "iterations": 1000,
            "groups_per_iteration": 4,
            "group_size": 2,
            "output_dir": folder / "runs",
            "model": {"path": folder / "model"},
            "data": {"train": folder / "train.jsonl", "max_prompt_tokens": 32},
            "rollout": {"max_new_tokens": 32, "max_model_len": 64},
            "reward": {"rewards": [{"name": "exact"}]},
            "trainer": {"optimizer": {"lr": 1e-3}},
        }
    )
    return config.model_copy(update=changes)
