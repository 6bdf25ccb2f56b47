"""Low-rank adapters on learner ranks: one rank equals PEFT, several ranks equal one; saves, exports and shared references.

The model has tied embeddings, grouped queries, biases and 45 tokens, so every rule of the mapping table is used.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyreme.config.model import ModelConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.config.trainer import LoraConfig, ParallelConfig, SftPhase
from polyreme_trainer.convert.command import convert
from polyreme_trainer.megatron.huggingface.lora_mapping import projection_of
from support import layout_chain, layout_checks, learning, lora_checks
from support.configs import algorithm, run_config
from support.layout_chain import TOLERANCE, agree, check_chain, train_ranks
from support.models import tiny_family_model, tiny_model
from support.ranks import run_ranks
from support.stages import prepared, run_rank, stage_config, write_data, write_model

pytestmark = pytest.mark.real

LORA = {"rank": 3, "alpha": 6.0}
VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS = {"tensor": {"tensor": 2}, "data": {"data": 2}, "pipeline": VIRTUAL, "one": dict[str, int]()}
KL = {"place": "loss", "estimator": "k3", "coef": 0.1}
SECTIONS = {
    "shared": algorithm(kl=KL),
    "copied": algorithm(kl=KL | {"renew_interval": 1000}),
    "ppo from the actor": AlgorithmConfig.model_validate({"preset": "ppo"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "tied", layers=4)


def test_values_gradients_and_merged_weights_are_those_of_peft(model: Path, tmp_path: Path) -> None:
    """This includes norms after the layers, experts, both model specs, and recomputed layers."""
    others = [tiny_family_model(name, tmp_path / name) for name in ("gemma3_text", "qwen2_moe")]
    run_ranks(lora_checks.compare_with_peft, 1, json.dumps([str(path) for path in (model, *others)]), str(tmp_path / "out"))


def a_run(steps: int, resume: Path | None = None, lora: dict[str, Any] = LORA, **save: Path) -> dict[str, Any]:
    return layout_chain.a_run(steps, resume, lora, **save)


def test_two_tensor_ranks_train_as_one_does_and_go_on_from_what_it_saved(model: Path, tmp_path: Path) -> None:
    """The adapters are on all projections, or on parts of fused layers."""
    out = tmp_path / "measured.json"
    kinds: dict[str, dict[str, Any]] = {"all": LORA, "some": {**LORA, "targets": ["q_proj", "up_proj"]}}
    one, two = (
        {(kind, step): tmp_path / f"{name}-{kind}-{step}" for kind in kinds for step in (2, 3)} for name in ("one", "two")
    )
    straight = [a_run(3, lora=lora, step_2=one[kind, 2], step_3=one[kind, 3]) for kind, lora in kinds.items()]
    expected = train_ranks(model, {}, out, *straight)["runs"]
    fresh = [a_run(2, lora=lora, step_2=two[kind, 2]) for kind, lora in kinds.items()]
    resumed = [a_run(1, resume=one[kind, 2], lora=lora, step_1=two[kind, 3]) for kind, lora in kinds.items()]
    found = train_ranks(model, LAYOUTS["tensor"], out, *fresh, *resumed)["runs"]
    for number in range(len(kinds)):
        steps = found[number] + found[len(kinds) + number]
        assert steps == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in expected[number]]
    for key, path in one.items():
        state = layout_checks.saved_state(model, path)
        for kind, tensors in layout_checks.saved_state(model, two[key]).items():
            agree(tensors, state[kind], TOLERANCE)
    assert {projection_of(name) for name in layout_checks.saved_state(model, two["some", 3])["weights"]} == {"q_proj", "up_proj"}


@pytest.mark.slow
def test_training_is_that_of_one_rank_and_resumes_on_any_layout(model: Path, tmp_path: Path) -> None:
    """Loss, moments and adapters after three steps. Then each layout goes on from the third step of the layout before it, and once more,
    to the same bits, from its own fourth step. Checkpoints have the adapters alone."""
    out = tmp_path / "measured.json"
    straight = train_ranks(model, {}, out, a_run(5, step_1=tmp_path / "at-1", step_3=tmp_path / "at-3"))["runs"][0]
    assert straight[4][0] < straight[0][0]
    saved = layout_checks.saved_state(model, tmp_path / "at-3")
    assert all(".lora_" in name for kind in saved.values() for name in kind)
    assert all(float(tensor.abs().max()) > 0 for tensor in saved["weights"].values())

    def train(layout: dict[str, int], *runs: dict[str, Any]) -> dict[str, Any]:
        return train_ranks(model, layout, out, *runs)

    check_chain(train, LAYOUTS, model, straight, tmp_path, tmp_path, LORA)


@pytest.mark.slow
def test_adapters_of_attention_beside_experts(tmp_path: Path) -> None:
    """Tensor ranks share the positions of a model with experts, and expert ranks all have the adapters."""
    model, out = tiny_family_model("qwen2_moe", tmp_path / "model", num_experts=4), tmp_path / "measured.json"
    expected = train_ranks(model, {}, out, a_run(3, step_3=tmp_path / "one"))["runs"][0]
    adapters = layout_checks.saved_state(model, tmp_path / "one")["weights"]
    for number, layout in enumerate(({"tensor": 2}, {"data": 2, "expert": 2})):
        found = train_ranks(model, layout, out, a_run(3, step_3=tmp_path / f"at-{number}"))["runs"][0]
        assert found == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in expected], layout
        agree(layout_checks.saved_state(model, tmp_path / f"at-{number}")["weights"], adapters, TOLERANCE)


@pytest.mark.slow
def test_bfloat16_adapters_and_their_copies_pass_from_layout_to_layout_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Adapters alone have optimizer state, and data ranks divide it."""
    out, before = tmp_path / "measured.json", tmp_path / "at-2"
    whole = train_ranks(model, {}, out, a_run(2, step_2=before), dtype="bfloat16")
    expected = layout_checks.saved_state(model, before)
    assert not all(torch.equal(expected["master"][name], tensor.float()) for name, tensor in expected["weights"].items())
    assert whole["state_bytes"] == 12 * sum(tensor.numel() for tensor in expected["weights"].values())
    for name in ("tensor", "data"):
        found = train_ranks(model, LAYOUTS[name], out, a_run(0, resume=before, step_0=tmp_path / name), dtype="bfloat16")
        for kind, tensors in layout_checks.saved_state(model, tmp_path / name).items():
            agree(tensors, expected[kind], 0.0)
        before = tmp_path / name
    assert found["state_bytes"] <= 0.6 * whole["state_bytes"]


def run_of(folder: Path, model: Path, parallel: ParallelConfig, **trainer: Any) -> RunConfig:
    """A run with adapters."""
    base = run_config(folder, model=ModelConfig(path=model))
    optimizer = base.trainer.optimizer.model_copy(update={"lr": learning.LR, "eps": learning.EPS})
    changes = {"parallel": parallel, "micro_batch_tokens": 128, "optimizer": optimizer, "lora": LoraConfig.model_validate(LORA)}
    return base.model_copy(update={"trainer": base.trainer.model_copy(update=changes | trainer)})


def train_every_way(model: Path, folder: Path, parallel: ParallelConfig) -> dict[str, list[dict[str, Any]]]:
    """The metrics of two iterations of each of SECTIONS, whose weights are in `folder`. A reference without memory computes as the frozen copy
    that a renewed reference has until it is renewed."""
    folder.mkdir()
    given = json.dumps({name: section.model_dump(mode="json") for name, section in SECTIONS.items()})
    config = run_of(folder, model, parallel)
    run_ranks(learning.train_every_way, parallel.world_size, config.model_dump_json(), given, str(folder))
    found: dict[str, list[dict[str, Any]]] = {
        name: json.loads((folder / f"{name}.json").read_text())["trained"] for name in SECTIONS
    }
    for one, other in zip(found["shared"], found["copied"], strict=True):
        other.pop("reference/version")
        assert one == other
    assert found["shared"][1]["actor/kl_loss"] > 0
    return found


def test_a_reference_in_the_actors_memory_is_a_frozen_copy_of_the_model(model: Path, tmp_path: Path) -> None:
    train_every_way(model, tmp_path / "1", ParallelConfig())


@pytest.mark.slow
def test_a_run_on_two_stages_is_that_on_one_rank(model: Path, tmp_path: Path) -> None:
    one = train_every_way(model, tmp_path / "1", ParallelConfig())
    two = train_every_way(model, tmp_path / "2", ParallelConfig(**VIRTUAL))
    for name in SECTIONS:
        agree(load_file(tmp_path / "2" / f"{name}.safetensors"), load_file(tmp_path / "1" / f"{name}.safetensors"), TOLERANCE)
        for expected, found in zip(one[name], two[name], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=TOLERANCE)


def test_a_run_resumes_after_a_warm_start_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    """The critic starts from the actor after the warm start. The export is the merged saved state."""
    phase = SftPhase(data=Path("unused"), steps=1, batch_size=12, lr=1e-2)
    ppo = AlgorithmConfig.model_validate({"preset": "ppo"})
    config = run_of(tmp_path, model, ParallelConfig(tensor=2), sft=[phase]).model_copy(update={"algorithm": ppo})
    for program in (lora_checks.warm_start_and_train, lora_checks.resume_and_train):
        run_ranks(program, 2, config.model_dump_json(), str(tmp_path))
    whole, resumed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumed"))
    agree(resumed, whole, 0.0)
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "resumed"))
    assert after["second"] == before["second"]
    assert [gate["value"] <= gate["limit"] for gate in before["gates"]] == [True, True]
    exported = [config.run_dir / "hf" / f"iteration-{version:06d}" for version in (0, 1)]
    for number, folder in enumerate(exported):
        convert(model, tmp_path / f"merged-{number}", adapter=folder / "adapter")
        agree(load_file(tmp_path / f"merged-{number}" / "model.safetensors"), load_file(folder / "model.safetensors"), 1e-6)
        assert (folder / "critic" / "model.safetensors").is_file()


def test_stages_train_adapters(tmp_path: Path) -> None:
    """The loss falls, the export is the model merged with its exported adapters, and the initial model is a reference without memory. The ranks
    have virtual stages."""
    write_data(tmp_path)
    write_model(tmp_path, layers=4)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    common = {"trainer__lora": LORA, "trainer__micro_batch_tokens": 64, "trainer__parallel": VIRTUAL}
    configs = {
        "sft": stage_config(tmp_path, "sft", name="sft", **common),
        "dpo": stage_config(tmp_path, "dpo", name="dpo", **common),
        "dpo of a copy": stage_config(tmp_path, "dpo", name="copied", reference=str(tmp_path / "copy"), **common),
        "reward-model": stage_config(tmp_path, "reward-model", name="reward-model", **common),
    }
    run_ranks(run_rank, 2, json.dumps([str(prepared(config)) for config in configs.values()]))
    steps = {name: steps_of(config) for name, config in configs.items()}
    assert all(losses[-1] < losses[0] for losses in steps.values())
    assert steps["dpo"] == steps["dpo of a copy"]
    for name in ("sft", "dpo"):
        final = configs[name].run_dir / "hf" / "final"
        convert(tmp_path / "model", tmp_path / f"{name}-merged", adapter=final / "adapter")
        agree(load_file(tmp_path / f"{name}-merged" / "model.safetensors"), load_file(final / "model.safetensors"), 1e-6)
    final = configs["reward-model"].run_dir / "hf" / "final"
    lora_checks.compare_classifiers(tmp_path / "model", final)


def steps_of(config: StageConfig) -> list[float]:
    """The losses of a stage's steps."""
    records = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]
