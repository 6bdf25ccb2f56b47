"""The recipes pass every check of `polyreme config check`, and their comments have its numbers.

The models are config.json files with the published sizes, a small tokenizer, and weights that are only a header and a size.
"""

import json
import re
from pathlib import Path

import pytest

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.rundir.checks import findings, memory_report
from polyreme_trainer.memory.estimate import GIB
from polyreme_trainer.memory.memory_estimate import learner_memory
from polyreme_trainer.memory.placement import advice, devices_needed
from support.published import PARAMETERS, published_model

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "recipes"
MODELS = {
    "gsm8k_0.5b.yaml": "Qwen2.5-0.5B-Instruct",
    "math_7b.yaml": "Qwen2.5-7B-Instruct",
    "ppo_32b_cuda.yaml": "Qwen2.5-32B",
    "ppo_32b_npu.yaml": "Qwen2.5-32B",
}
SUM = re.compile(r"# Learner, in GiB: .* = ([\d.]+) of ([\d.]+)\.\n")


@pytest.fixture(autouse=True)
def on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has devices of every kind."""
    monkeypatch.setattr("polyreme_trainer.checks.has_device", lambda kind: True)


def load(recipe: str, folder: Path, *overrides: str) -> RunConfig:
    rows = [{"question": f"{n} + 1?", "problem": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    folder.mkdir(exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model.path": published_model(MODELS[recipe], folder / "model"),
        "data.config": "null",
        "data.train": data,
        "data.eval": data,
    }
    return load_config(RECIPES / recipe, [*(f"{key}={value}" for key, value in given.items()), *overrides])


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


TERM = re.compile(r"([\d.]+) (state|activations|logits|backward)")


@pytest.mark.parametrize("recipe", MODELS)
def test_each_addend_in_the_comment_is_one_of_the_estimate(recipe: str, tmp_path: Path) -> None:
    rank = learner_memory(load(recipe, tmp_path)).rank
    found = {name: float(value) for value, name in TERM.findall((RECIPES / recipe).read_text())}
    terms = {term.name.rpartition(" ")[2]: term.nbytes / GIB for term in rank.step}
    expected = {"state": sum(term.nbytes for term in rank.state) / GIB} | terms
    assert found == {name: pytest.approx(value, abs=0.006) for name, value in expected.items()}


@pytest.mark.parametrize("recipe", MODELS)
def test_the_weights_of_a_replica_are_those_in_the_comment(recipe: str, tmp_path: Path) -> None:
    config = load(recipe, tmp_path)
    weights = PARAMETERS[MODELS[recipe]] * 2 / GIB / config.rollout.tensor_parallel
    [line] = [line for line in (RECIPES / recipe).read_text().splitlines() if line.startswith("# Replica")]
    assert any(abs(float(number) - weights) < 0.06 for number in re.findall(r"\d+\.\d+", line)), line


def hosts(config: RunConfig) -> list[float]:
    """GiB of the host's memory on each of the learner's machines."""
    return [machine.host / GIB for machine in learner_memory(config).machines]


@pytest.mark.parametrize("recipe", [name for name in MODELS if "32b" in name])
def test_the_host_memory_of_32b_is_that_in_the_comment_and_on_the_page(recipe: str, tmp_path: Path) -> None:
    (first, *_), text = hosts(load(recipe, tmp_path)), (RECIPES / recipe).read_text()
    assert f"{first:,.0f} GiB" in text and f"{first:,.0f}" in (RECIPES / "README.md").read_text()


def test_the_recipe_for_npu_also_runs_on_the_dies_of_the_learner_alone(tmp_path: Path) -> None:
    """As in the example of MindSpeed RL, where 16 dies train and generate in turn."""
    apart = load("ppo_32b_npu.yaml", tmp_path)
    together = load("ppo_32b_npu.yaml", tmp_path / "again", "placement=colocated", "rollout.vllm.sleep_level=2")
    assert [devices_needed(config, config.placement) for config in (apart, together)] == [32, 16]
    assert [str(error) for error in findings(together).errors] == []
    assert hosts(together) == hosts(apart)


@pytest.mark.parametrize(("data", "ppo", "grpo"), [(1, 160.3, 93.2), (2, 115.0, 70.3), (8, 81.1, 53.2)])
def test_the_table_of_32b_without_offload(data: int, ppo: float, grpo: float, tmp_path: Path) -> None:
    layout = [f"trainer.parallel={{tensor: 8, data: {data}}}", "trainer.offload={}"]
    algorithms = {ppo: [], grpo: ["algorithm={preset: grpo, minibatches: 4}", "trainer.critic={}"]}
    for number, (expected, overrides) in enumerate(algorithms.items()):
        found = learner_memory(load("ppo_32b_cuda.yaml", tmp_path / str(number), *layout, *overrides)).rank.nbytes / GIB
        assert found == pytest.approx(expected, abs=0.06)
    page = (RECIPES / "README.md").read_text()
    assert f"| {ppo} " in page and f"| {grpo} " in page


def test_longer_answers_of_7b_need_offload(tmp_path: Path) -> None:
    longer = ["rollout.max_new_tokens=7168", "rollout.max_model_len=8192", "trainer.micro_batch_tokens=8192"]
    page = (RECIPES / "README.md").read_text()
    for number, overrides in enumerate(([], ["trainer.offload.optimizer=true"])):
        needed = learner_memory(load("math_7b.yaml", tmp_path / str(number), *longer, *overrides)).rank.nbytes / GIB
        assert f"{needed:.2f} GiB" in page


def test_the_recipe_for_one_card_runs_on_one_card(tmp_path: Path) -> None:
    """In turn: while an engine starts, vLLM counts what a learner beside it allocates as its own."""
    config = load("gsm8k_0.5b.yaml", tmp_path)
    assert devices_needed(config, config.placement) == 1 and not list(advice(config, 1))
    [host] = hosts(config)
    assert all(f"{host:.1f}" in path.read_text() for path in (RECIPES / "gsm8k_0.5b.yaml", RECIPES / "README.md"))
