"""The recipes pass every check of `polyreme config check`, and their comments have its numbers.

The models are config.json files with the published sizes, a small tokenizer, and weights that are only a header and a size.
"""

import json
import re
from pathlib import Path

import pytest

from polyreme.cli.checks import findings, memory_report
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme_trainer.megatron.memory.estimate import GIB
from polyreme_trainer.memory_estimate import learner_memory
from support.published import published_model

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "recipes"
MODELS = {
    "gsm8k_0.5b.yaml": "Qwen2.5-0.5B-Instruct",
    "math_7b.yaml": "Qwen2.5-7B-Instruct",
    "ppo_32b_cuda.yaml": "Qwen2.5-32B",
    "ppo_32b_npu.yaml": "Qwen2.5-32B",
}
SUM = re.compile(r"# Learner, in GiB: .* = ([\d.]+) of ([\d.]+)\.\n")


def load(recipe: str, folder: Path) -> RunConfig:
    rows = [{"question": f"{n} + 1?", "problem": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model.path": published_model(MODELS[recipe], folder / "model"), "data.train": data, "data.eval": data}
    return load_config(RECIPES / recipe, [f"{key}={value}" for key, value in given.items()])


def test_every_recipe_is_checked() -> None:
    assert {path.name for path in RECIPES.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("recipe", MODELS)
def test_a_recipe_can_start_and_fits_the_device_that_it_names(recipe: str, tmp_path: Path) -> None:
    config = load(recipe, tmp_path)
    assert [str(error) for error in findings(config).errors] == []
    found = SUM.search((RECIPES / recipe).read_text())
    assert found is not None
    needed, device = map(float, found.groups())
    assert learner_memory(config).rank.nbytes / GIB == pytest.approx(needed, abs=0.006)
    assert f"{needed:.2f} of {device:g}" in (RECIPES / "README.md").read_text()
    assert memory_report(config, int(device * GIB)).errors == ()
    assert memory_report(config, int((needed - 1) * GIB)).errors
