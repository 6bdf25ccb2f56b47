"""Low-rank adapters on learner ranks: PEFT's numbers on one rank, one rank's on several, and what is saved, exported and shared.

The model has tied embeddings, grouped queries, biases and 45 tokens, so every rule of the mapping table is used.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme.config.algorithm import AlgorithmConfig
from polyreme.config.model import ModelConfig
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.config.trainer import LoraConfig, ParallelConfig, SftPhase
from polyreme_trainer.convert.command import convert
from support import layout_checks, learning, lora_checks
from support.configs import algorithm, run_config
from support.models import tiny_family_model, tiny_model
from support.ranks import run_ranks
from support.stages import prepared, run_rank, stage_config, write_data, write_model

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
LORA = {"rank": 3, "alpha": 6.0}
LAYOUTS = {"tensor": {"tensor": 2}, "data": {"data": 2}, "pipeline": {"pipeline": 2}, "one": dict[str, int]()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "tied")


def test_values_gradients_and_merged_weights_are_those_of_peft(model: Path, tmp_path: Path) -> None:
    """Also with norms after the layers, with experts, on both model specs, and with recomputed layers."""
    others = [tiny_family_model(name, tmp_path / name) for name in ("gemma3_text", "qwen2_moe")]
    run_ranks(lora_checks.compare_with_peft, 1, json.dumps([str(path) for path in (model, *others)]), str(tmp_path / "out"))


def follow(model: Path, layout: dict[str, int], out: Path, *runs: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    order = {"model": str(model), "dtype": dtype, "out": str(out), "layout": layout, "lora": LORA, "runs": runs}
    run_ranks(layout_checks.follow, ParallelConfig(**layout).world_size, json.dumps(order), timeout=240)
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def a_run(steps: int, resume: Path | None = None, **save: Path) -> dict[str, Any]:
    """`save`: step_N=path."""
    saves = {name.removeprefix("step_"): str(path) for name, path in save.items()}
    return {"steps": steps, "resume": None if resume is None else str(resume), "save": saves}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close({name: found[name]}, {name: tensor}, rtol=0, atol=tolerance)


def test_training_is_that_of_one_rank_and_resumes_on_any_layout(model: Path, tmp_path: Path) -> None:
    """Loss, moments and adapters after three steps. Then each layout goes on from the third step of the layout before it, and once more,
    to the same bits, from its own fourth step. Checkpoints have the adapters alone."""
    out = tmp_path / "measured.json"
    straight = follow(model, {}, out, a_run(5, step_1=tmp_path / "at-1", step_3=tmp_path / "at-3"))["runs"][0]
    assert straight[4][0] < straight[0][0]
    reference = [layout_checks.saved_state(model, tmp_path / name) for name in ("at-1", "at-3")]
    assert all(".lora_" in name for kind in reference[1].values() for name in kind)
    assert all(float(tensor.abs().max()) > 0 for tensor in reference[1]["weights"].values())
    before = tmp_path / "at-3"
    for name, layout in LAYOUTS.items():
        at = {number: tmp_path / f"{name}-{number}" for number in (1, 3, 4, 5, 6)}
        found = follow(
            model,
            layout,
            out,
            a_run(3, step_1=at[1], step_3=at[3]),
            a_run(2, resume=before, step_1=at[4], step_2=at[5]),
            a_run(1, resume=at[4], step_1=at[6]),
        )
        fresh, resumed, again = found["runs"]
        assert fresh == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in straight[:3]], name
        assert resumed == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in straight[3:]], name
        assert again == resumed[1:], name
        for number, state in zip((1, 3), reference, strict=True):
            for kind, tensors in layout_checks.saved_state(model, at[number]).items():
                agree(tensors, state[kind], TOLERANCE)
        last, repeated = (layout_checks.saved_state(model, at[number]) for number in (5, 6))
        for kind in last:
            agree(repeated[kind], last[kind], 0.0)
        before = at[3]


def test_adapters_of_attention_beside_experts(tmp_path: Path) -> None:
    """Tensor ranks share the positions of a model with experts, and expert ranks all have the adapters."""
    model, out = tiny_family_model("qwen2_moe", tmp_path / "model", num_experts=4), tmp_path / "measured.json"
    expected = follow(model, {}, out, a_run(3, step_3=tmp_path / "one"))["runs"][0]
    adapters = layout_checks.saved_state(model, tmp_path / "one")["weights"]
    for number, layout in enumerate(({"tensor": 2}, {"data": 2, "expert": 2})):
        found = follow(model, layout, out, a_run(3, step_3=tmp_path / f"at-{number}"))["runs"][0]
        assert found == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in expected], layout
        agree(layout_checks.saved_state(model, tmp_path / f"at-{number}")["weights"], adapters, TOLERANCE)


def test_bfloat16_adapters_and_their_copies_pass_from_layout_to_layout_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Adapters alone have optimizer state, and data ranks divide it."""
    out, before = tmp_path / "measured.json", tmp_path / "at-2"
    whole = follow(model, {}, out, a_run(2, step_2=before), dtype="bfloat16")
    expected = layout_checks.saved_state(model, before)
    assert not all(torch.equal(expected["master"][name], tensor.float()) for name, tensor in expected["weights"].items())
    assert whole["state_bytes"] == 12 * sum(tensor.numel() for tensor in expected["weights"].values())
    for name in ("tensor", "data"):
        found = follow(model, LAYOUTS[name], out, a_run(0, resume=before, step_0=tmp_path / name), dtype="bfloat16")
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


def test_a_run_on_any_ranks_with_a_reference_in_the_actors_memory(model: Path, tmp_path: Path) -> None:
    """The reference without memory is the frozen copy that a renewed reference has until it is renewed."""
    kl = {"place": "loss", "estimator": "k3", "coef": 0.1}
    sections = {
        "shared": algorithm(kl=kl),
        "copied": algorithm(kl=kl | {"renew_interval": 1000}),
        "ppo from the actor": AlgorithmConfig.model_validate({"preset": "ppo"}),
    }
    given = json.dumps({name: section.model_dump(mode="json") for name, section in sections.items()})
    found: dict[str, dict[str, Any]] = {}
    for parallel in (ParallelConfig(), ParallelConfig(pipeline=2)):
        (out := tmp_path / str(parallel.pipeline)).mkdir()
        config = run_of(out, model, parallel)
        run_ranks(learning.train_every_way, parallel.world_size, config.model_dump_json(), given, str(out))
        found[out.name] = {name: json.loads((out / f"{name}.json").read_text())["trained"] for name in sections}
        for one, other in zip(found[out.name]["shared"], found[out.name]["copied"], strict=True):
            other.pop("reference/version")
            assert one == other
        assert found[out.name]["shared"][1]["actor/kl_loss"] > 0
    for name in sections:
        agree(load_file(tmp_path / "2" / f"{name}.safetensors"), load_file(tmp_path / "1" / f"{name}.safetensors"), TOLERANCE)
        for one, several in zip(found["1"][name], found["2"][name], strict=True):
            assert several == pytest.approx(one, rel=1e-4, abs=TOLERANCE)


def test_a_run_resumes_after_a_warm_start_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    """With a critic that starts from the actor after the warm start. What was exported is what was saved, merged."""
    base = shutil.copytree(model, tmp_path / "base")
    phase = SftPhase(data=Path("unused"), steps=1, batch_size=12, lr=1e-2)
    ppo = AlgorithmConfig.model_validate({"preset": "ppo"})
    config = run_of(tmp_path, base, ParallelConfig(tensor=2), sft=[phase]).model_copy(update={"algorithm": ppo})
    for program in (lora_checks.warm_start_and_train, lora_checks.resume_and_train):
        run_ranks(program, 2, config.model_dump_json(), str(tmp_path))
    whole, resumed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumed"))
    agree(resumed, whole, 0.0)
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "resumed"))
    assert after["second"] == before["second"]
    assert [gate["value"] <= gate["limit"] for gate in before["gates"]] == [True, True]
    exported = [config.run_dir / "hf" / f"iteration-{version:06d}" for version in (0, 1)]
    for number, folder in enumerate(exported):
        convert(base, tmp_path / f"merged-{number}", adapter=folder / "adapter")
        agree(load_file(tmp_path / f"merged-{number}" / "model.safetensors"), load_file(folder / "model.safetensors"), 1e-6)
        assert (folder / "critic" / "model.safetensors").is_file()
    damaged = load_file(base / "model.safetensors")
    damaged["model.norm.weight"] += 1
    save_file(damaged, base / "model.safetensors", metadata={"format": "pt"})
    one = run_of(tmp_path, base, ParallelConfig(), sft=[phase]).model_copy(update={"algorithm": ppo})
    run_ranks(lora_checks.resume_beside_other_weights, 1, one.model_dump_json(), str(tmp_path / "error"))
    assert str(base) in (tmp_path / "error").read_text()


def test_stages_train_adapters(tmp_path: Path) -> None:
    """The loss falls, the export is the model with the adapters that are beside it, and the initial model is a reference without memory."""
    write_data(tmp_path)
    write_model(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    common = {"trainer__lora": LORA, "trainer__micro_batch_tokens": 64, "trainer__parallel": {"pipeline": 2}}
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
    run_ranks(lora_checks.compare_classifiers, 1, str(tmp_path / "model"), str(final))


def steps_of(config: StageConfig) -> list[float]:
    """The losses of a stage's steps."""
    records = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]
