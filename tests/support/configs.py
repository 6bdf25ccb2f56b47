"""Small run configurations for tests."""

from pathlib import Path
from typing import Any

from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import TrainerConfig

ALGORITHM: dict[str, Any] = {"preset": "grpo", "kl": None, "aggregation": "token-mean", "advantage": {"std_floor": 1e-4}}
"""Group-relative advantages and the token mean, without a reference model."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 33,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16,
}
"""The config.json of a small dense model."""
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""The config.json of a small model with experts."""
GLM4_MOE = LLAMA | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 4,
    "head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
"""The config.json of a small model with a dense layer, expert biases in the three others, and one MTP layer."""


def run_config(folder: Path, **changes: Any) -> RunConfig:
    """A valid configuration whose paths lie in `folder` (nothing is read from them); `changes` replace top-level fields without
    validation."""
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
            "trainer": trainer(),
        }
    )
    return config.model_copy(update=changes)


def algorithm(**changes: Any) -> AlgorithmConfig:
    """ALGORITHM with changed keys."""
    return AlgorithmConfig.model_validate({**ALGORITHM, **changes})


def trainer(**changes: Any) -> TrainerConfig:
    """The smallest section `trainer`, with changed keys."""
    return TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}, **changes})
