"""Offload to the host's memory: the same bits as without it, and only what is in use on the device."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyreme.config.model import ModelConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.trainer import ParallelConfig
from support import offload_checks
from support.configs import run_config
from support.models import tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real


@pytest.mark.parametrize("ranks", [1, 2])
def test_offload_changes_no_bit_and_keeps_idle_memory_off_the_device(ranks: int, tmp_path: Path) -> None:
    """PPO with critic and reference; with two data ranks, the distributed optimizer's parts."""
    config = run_config(tmp_path, model=ModelConfig(path=tiny_model("tied", tmp_path / "model")))
    trainer = config.trainer.model_copy(update={"parallel": ParallelConfig(data=ranks), "micro_batch_tokens": 128})
    algorithm = AlgorithmConfig.model_validate({"preset": "ppo", "minibatches": 2})
    config = config.model_copy(update={"trainer": trainer, "algorithm": algorithm})
    run_ranks(offload_checks.train_with_and_without, ranks, config.model_dump_json(), str(tmp_path))
    seen = json.loads((tmp_path / "seen.json").read_text())
    for dtype in ("float32", "bfloat16"):
        plain = load_file(tmp_path / f"{dtype}-plain.safetensors")
        metrics = json.loads((tmp_path / f"{dtype}-plain.json").read_text())
        for name in [key.removeprefix(f"{dtype}-") for key in seen if key.startswith(dtype)]:
            found = load_file(tmp_path / f"{dtype}-{name}.safetensors")
            torch.testing.assert_close(found, plain, rtol=0, atol=0)
            assert json.loads((tmp_path / f"{dtype}-{name}.json").read_text()) == metrics
        torch.testing.assert_close(load_file(tmp_path / f"{dtype}-resumed.safetensors"), plain, rtol=0, atol=0)
        whole, both = seen[f"{dtype}-plain"]["most"], seen[f"{dtype}-both"]
        most = both["most"]
        assert (whole["models"], most["models"]) == (3, 1)
        assert most["weights"] < 0.4 * whole["weights"]
        assert most["gradients"] < 0.6 * whole["gradients"]
        assert whole["optimizer at a forward pass"] > 0 == most["optimizer at a forward pass"]
        assert both["parts"] > 1 and most["optimizer at a step"] < 0.5 * whole["optimizer at a step"]
        assert both["moved"] > 0 == seen[f"{dtype}-plain"]["moved"]
    optimizer, idle = (seen[f"bfloat16-{name}"]["most"] for name in ("optimizer", "idle"))
    assert (optimizer["models"], optimizer["optimizer at a forward pass"]) == (3, 0)
    assert idle["models"] == 1 and idle["optimizer at a step"] > 2 * optimizer["optimizer at a step"]
