"""A stopped warm start continues to the same bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyreme.config.model import ModelConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import ParallelConfig, SftPhase
from support import warm_start
from support.configs import run_config
from support.models import tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

NEVER = 1000


def config_of(folder: Path, model: Path) -> RunConfig:
    """Two phases of 30 and 20 steps on two tensor ranks. Every tenth step is reported."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) for n in range(20)))
    phases = [SftPhase(data=rows, steps=steps, batch_size=4, lr=1e-3, warmup=3, cooldown=5) for steps in (30, 20)]
    config = run_config(folder, model=ModelConfig(path=model))
    trainer = config.trainer.model_copy(update={"parallel": ParallelConfig(tensor=2), "sft": phases})
    return config.model_copy(update={"trainer": trainer})


@pytest.mark.parametrize(
    ("reports", "done", "saves"),
    [(2, [[1, 10], [1, 20]], [20]), (3, [[1, 10], [1, 20], [1, 30], [2, 10]], [30, 40])],
    ids=["first phase", "second phase"],
)
def test_a_stopped_warm_start_continues_to_the_same_bits(
    reports: int, done: list[list[int]], saves: list[int], tmp_path: Path
) -> None:
    """The stop is requested within the first phase, and at its end, where the second phase notices it."""
    model = tiny_model("tied", tmp_path / "model")
    for name, stop in (("straight", (NEVER,)), ("parts", (reports, NEVER))):
        (folder := tmp_path / name).mkdir()
        config = config_of(folder, model).model_dump_json()
        for part, after in enumerate(stop):
            run_ranks(warm_start.warm_up, 2, config, str(after), str(folder / str(part)))
    whole, first, rest = (
        json.loads((tmp_path / name).with_suffix(".json").read_text()) for name in ("straight/0", "parts/0", "parts/1")
    )
    assert (whole["complete"], first["complete"], rest["complete"]) == (True, False, True)
    assert (whole["saves"], first["saves"], rest["saves"]) == ([30], saves, [30] if saves == [20] else [])
    assert first["steps"] == done and whole["steps"] == first["steps"] + rest["steps"]
    straight, resumed, stopped = (load_file(tmp_path / f"{name}.safetensors") for name in ("straight/0", "parts/1", "parts/0"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert not all(torch.equal(tensor, stopped[name]) for name, tensor in straight.items())
