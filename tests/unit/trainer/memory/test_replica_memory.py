"""A replica that cannot hold its weights and one sample on its devices is refused before it starts."""

from pathlib import Path
from typing import Any

import pytest

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme_trainer.memory.memory_estimate import report
from polyreme_trainer.memory.replica_memory import refuse_replica, replica_line
from support.published import PARAMETERS, published_config

NAME = "Qwen2.5-7B-Instruct"
KEYS = 2 * 28 * 4 * 128 * 2
"""Bytes of a token's keys and values in bfloat16: 28 layers, 4 heads of 128."""


def run(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "iterations": 1,
            "groups_per_iteration": 1,
            "group_size": 2,
            "device": "cuda",
            "model": {"path": published_config(NAME, folder / "model"), "dtype": "bfloat16"},
            "data": {"train": folder / "train.jsonl", "max_prompt_tokens": 1024},
            "rollout": {"max_new_tokens": 3072, "max_model_len": 4096, "vllm": {"gpu_memory_utilization": 0.5}, **changes},
            "reward": {"rewards": [{"name": "exact"}]},
            "algorithm": {"preset": "dapo"},
            "trainer": {"optimizer": {"lr": 1e-6}},
        }
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_weights_and_one_sample_must_fit(tensor: int, tmp_path: Path) -> None:
    config = run(tmp_path, tensor_parallel=tensor)
    needed = 2 * (2 * PARAMETERS[NAME] + 4096 * KEYS) // tensor  # half of the device
    assert not list(refuse_replica(config, needed))
    (error,) = refuse_replica(config, needed - 2)
    assert isinstance(error, ConfigError) and "weights" in error.found and f"rollout.tensor_parallel: {tensor}" in error.found


def test_it_is_an_error_of_the_report_beside_the_learner_s(tmp_path: Path) -> None:
    config = run(tmp_path)
    found = list(report(config, 16 << 30))
    assert sum(isinstance(each, ConfigError) for each in found) == 2
    assert any(isinstance(each, str) and replica_line(config) in each for each in found)


def test_a_replica_on_cpu_and_another_engine_are_not_vllm_on_a_device(tmp_path: Path) -> None:
    config = run(tmp_path)
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "another"})})
    for each in (config.model_copy(update={"device": "cpu"}), other):
        assert not list(refuse_replica(each, 1))
