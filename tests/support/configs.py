"""Small run configurations for tests."""

from pathlib import Path
from typing import Any

from polyreme.config.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig

ALGORITHM: dict[str, Any] = {"preset": "grpo", "kl": None, "aggregation": "token-mean", "advantage": {"std_floor": 1e-4}}
"""Group-relative advantages and the token mean, without a reference model."""


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
            "algorithm": ALGORITHM,
            "trainer": {"optimizer": {"lr": 1e-3}},
        }
    )
    return config.model_copy(update=changes)


def algorithm(**changes: Any) -> AlgorithmConfig:
    """ALGORITHM with other keys."""
    return AlgorithmConfig.model_validate({**ALGORITHM, **changes})
