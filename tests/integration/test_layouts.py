"""Layouts of the ranks: training equals that of one rank, and a run resumes in another layout.

The model has tied embeddings, grouped queries, biases and 45 tokens, so every rule of the mapping table is used, and padding too.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.huggingface.families import known_families
from support import layout_checks, part_checks
from support.layout_chain import TOLERANCE, a_run, agree, check_chain, train_ranks
from support.models import tiny_family_model, tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

ONE: dict[str, int] = {}
VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
TWO = {"pipeline": {"pipeline": 2}, "virtual": VIRTUAL, "tensor": {"tensor": 2}, "data": {"data": 2}}
"""The layouts of two ranks."""
CONTEXT = {"context": 2}
EXPERT = {"data": 2, "expert": 2}
CUT = {"data": 2, "expert_tensor": 2}
WHOLE = {"tensor": 2, "expert": 2, "expert_tensor": 1}
"""Layouts that cut experts but not attention, and the reverse."""
MOE = {"aux_loss_coef": 0.3, "z_loss_coef": 0.1, "replay_routes": True}
"""All settings of routers that have no expert bias."""
RATE = 0.01
"""Change of the expert biases in a step."""

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "tied", layers=4)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen2_moe", tmp_path_factory.mktemp("experts"), num_experts=6)


@pytest.fixture(scope="module")
def train(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs `layout_checks.run_orders` on a layout's ranks."""
    out = tmp_path_factory.mktemp("out") / "measured.json"

    def run(layout: dict[str, int], *runs: dict[str, Any], dtype: str = "float32", model: Path = model) -> dict[str, Any]:
        return train_ranks(model, layout, out, *runs, dtype=dtype)

    return run


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Five steps of one rank, and the folder of its checkpoints `at-1` and `at-3`."""
    folder = tmp_path_factory.mktemp("straight")
    return train(ONE, a_run(5, step_1=folder / "at-1", step_3=folder / "at-3")), folder


def test_training_is_that_of_one_rank_and_resumes_on_any_layout(
    train: Train, straight: tuple[dict[str, Any], Path], model: Path, tmp_path: Path
) -> None:
    expected, folder = straight
    check_chain(train, {**TWO, "context": CONTEXT, "one": ONE}, model, expected["runs"][0], folder, tmp_path)


def test_expert_ranks_train_as_one_rank_and_a_run_leaves_and_enters_them(train: Train, experts: Path, tmp_path: Path) -> None:
    expected = train(ONE, a_run(5, step_1=tmp_path / "at-1", step_3=tmp_path / "at-3"), model=experts)["runs"][0]
    layouts = {"expert": EXPERT, "cut": CUT, "whole": WHOLE, "one": ONE}
    check_chain(partial(train, model=experts), layouts, experts, expected, tmp_path, tmp_path)


def test_every_kind_of_model_with_experts_trains_on_expert_ranks_as_on_one(train: Train, experts: Path, tmp_path: Path) -> None:
    """All families, balanced and replayed routers, recomputed activations, adapters, and bfloat16 with full-precision copies, which also pass to them bit for bit."""
    glm = tiny_family_model("glm4_moe", tmp_path / "glm4_moe", n_routed_experts=4)
    kinds: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"model": str(tiny_family_model("qwen3_moe", tmp_path / "qwen3_moe", num_experts=4))},
        "mixtral": {"model": str(tiny_family_model("mixtral", tmp_path / "mixtral", num_local_experts=4))},
        "olmoe": {"model": str(tiny_family_model("olmoe", tmp_path / "olmoe", num_experts=4))},
        "glm4_moe": {"model": str(glm), "moe": MOE | {"bias_update_rate": RATE}, "recompute": "selective"},
        "frozen biases": {"model": str(glm), "lora": {"rank": 3, "alpha": 6.0}},
        "routers": {"moe": MOE, "recompute": "full"},
        "full": {"recompute": "full"},
        "selective": {"recompute": "selective"},
        "lora": {"lora": {"rank": 3, "alpha": 6.0}},
        "bfloat16": {"dtype": "bfloat16"},
    }
    runs = {name: [a_run(3, step_3=tmp_path / f"{name}-{number}") | kind for number in (1, 2)] for name, kind in kinds.items()}
    expected = train(ONE, *(one for one, _ in runs.values()), model=experts)["runs"]
    again = a_run(0, tmp_path / "bfloat16-1", step_0=tmp_path / "again") | kinds["bfloat16"]
    found = train(EXPERT, *(two for _, two in runs.values()), again, model=experts)["runs"]
    for (name, kind), one, two in zip(kinds.items(), expected, found, strict=False):
        tolerance = 0.02 if name == "bfloat16" else TOLERANCE
        assert two == [pytest.approx(step, rel=tolerance, abs=tolerance) for step in one], name
        model = Path(kind.get("model", experts))
        states = [layout_checks.saved_state(model, tmp_path / f"{name}-{number}") for number in (1, 2)]
        agree(states[1]["weights"], states[0]["weights"], tolerance)
    whole, passed = (layout_checks.saved_state(experts, tmp_path / name) for name in ("bfloat16-1", "again"))
    for state, tensors in whole.items():
        agree(passed[state], tensors, 0.0)
    assert not all(torch.equal(whole["master"][name], tensor.float()) for name, tensor in whole["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, MOE, {"recompute": "full"}])
def test_expert_biases_are_those_of_one_rank_and_are_resumed_on_any_layout(
    settings: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    """Of a model whose first layer has no experts. Each layout also compares the bits on all of its ranks, see `layout_checks`."""
    model = tiny_family_model("glm4_moe", tmp_path / "model", n_routed_experts=6)
    kind = {"recompute": settings["recompute"]} if "recompute" in settings else {}
    kind["moe"] = {"bias_update_rate": RATE} | (MOE if settings is MOE else {})

    def run(layout: dict[str, int], *runs: dict[str, Any]) -> dict[str, Any]:
        return train(layout, *(each | kind for each in runs), model=model)

    expected = run(ONE, a_run(5, step_1=tmp_path / "at-1", step_3=tmp_path / "at-3"))["runs"][0]
    before, after = load_file(model / "model.safetensors"), layout_checks.saved_state(model, tmp_path / "at-3")["weights"]
    for name in (name for name in before if name.endswith("e_score_correction_bias")):
        steps = (after[name] - before[name]) / RATE  # each step moves a number by one rate, or not at all
        assert steps.abs().max() <= 3 + 1e-3 and (steps - steps.round()).abs().max() < 1e-3 and steps.any()
    layouts = {**TWO, "expert": EXPERT, "context": CONTEXT, "whole": WHOLE, "both": {"tensor": 2, "pipeline": 2}, "one": ONE}
    check_chain(run, layouts, model, expected, tmp_path, tmp_path)


@pytest.mark.slow
def test_expert_biases_of_a_bfloat16_model_pass_from_layout_to_layout_in_full_precision(train: Train, tmp_path: Path) -> None:
    model = tiny_family_model("glm4_moe", tmp_path / "model", n_routed_experts=4)
    kind, first = {"moe": {"bias_update_rate": RATE}}, tmp_path / "first"
    train(ONE, a_run(2, step_2=first) | kind, dtype="bfloat16", model=model)
    expected, before = layout_checks.saved_state(model, first), first
    biases = {name: tensor for name, tensor in expected["weights"].items() if tensor.dtype == torch.float32}
    assert len(biases) == 3 and not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in biases.values())
    for name, layout in {**TWO, "expert": EXPERT, "one": ONE}.items():
        train(layout, a_run(0, resume=before, step_0=tmp_path / name) | kind, dtype="bfloat16", model=model)
        for state, tensors in layout_checks.saved_state(model, tmp_path / name).items():
            agree(tensors, expected[state], 0.0)
        before = tmp_path / name


def test_every_family_trains_on_two_stages_as_on_one_rank(train: Train, tmp_path: Path) -> None:
    runs = [a_run(2) | {"model": str(tiny_family_model(name, tmp_path / name))} for name in known_families()]
    expected, found = (train(layout, *runs)["runs"] for layout in (ONE, TWO["pipeline"]))
    for name, one, two in zip(known_families(), expected, found, strict=True):
        assert two == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in one], name


def test_bfloat16_weights_and_their_copies_pass_from_layout_to_layout_bit_for_bit(
    train: Train, model: Path, tmp_path: Path
) -> None:
    first = tmp_path / "at-2"
    whole = train(ONE, a_run(3, step_2=first), dtype="bfloat16")
    expected, before = layout_checks.saved_state(model, first), first
    assert not all(torch.equal(expected["master"][name], tensor.float()) for name, tensor in expected["weights"].items())
    for number, layout in enumerate([*TWO.values(), ONE], start=3):
        path = tmp_path / f"at-{number}"
        found = train(layout, a_run(1, resume=before, step_0=path), dtype="bfloat16")
        assert found["runs"][0][0] == pytest.approx(whole["runs"][0][2], rel=0.02, abs=0.005)
        for kind, tensors in layout_checks.saved_state(model, path).items():
            agree(tensors, expected[kind], 0.0)
        if layout == TWO["data"]:
            assert found["state_bytes"] <= 0.6 * whole["state_bytes"]
        before = path


FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
FOUR = {
    "tied": [{"tensor": 2, "pipeline": 2}, {"data": 2, **VIRTUAL}],
    "experts": [
        {"tensor": 2, "expert_tensor": 1, **VIRTUAL},
        {**CONTEXT, "expert": 2, "tensor": 2},
        {**CONTEXT, "expert": 2, "pipeline": 2},
    ],
}


@pytest.mark.parametrize("kind", FOUR)
def test_stages_combine_with_other_ranks_and_with_experts(kind: str, train: Train, model: Path, tmp_path: Path) -> None:
    """With experts, tensor ranks share the positions, and send each other's hidden states to the next stage; where they do not cut experts,
    they have copies of them. Balanced and replayed routers follow the micro-batches from stage to stage, also in recomputed layers. Context
    ranks may share experts as data ranks do, and a position's routes are on the rank of its token. Each layer of a virtual stage has its
    own number: its routes, or, as every second layer of Gemma 3, its window."""
    more: dict[str, Any] = {}
    gemma = tiny_family_model("gemma3_text", tmp_path / "gemma", **FOUR_LAYERS)
    others = [a_run(2) | {"model": str(gemma)}, a_run(2, lora={"rank": 3, "alpha": 6.0})]
    if kind == "experts":
        model = tiny_family_model("qwen2_moe", tmp_path / "experts", num_experts=6, num_hidden_layers=4)
        more, others = {"moe": MOE, "recompute": "full"}, []
    first = tmp_path / "one-3"
    expected, *expected_others = train(ONE, a_run(3, step_3=first) | more, *others, model=model)["runs"]
    weights = layout_checks.saved_state(model, first)["weights"]
    for number, layout in enumerate(FOUR[kind], start=4):
        path = tmp_path / f"at-{number}"
        found, *found_others = train(layout, a_run(3, step_3=path) | more, *others, model=model)["runs"]
        assert found == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in expected], layout
        for one, several in zip(expected_others, found_others, strict=True):
            assert several == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in one], layout
        agree(layout_checks.saved_state(model, path)["weights"], weights, TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", {"pipeline": 2}), ("untied", VIRTUAL), ("experts", {**CONTEXT, "expert": 2}), ("experts", WHOLE)],
)
def test_a_version_that_several_ranks_write_is_the_exported_model_bit_for_bit(
    kind: str, layout: dict[str, int], experts: Path, tmp_path: Path
) -> None:
    path = experts if kind == "experts" else tiny_model("tied" if kind == "tied" else "untied", tmp_path / "model", layers=4)
    run_ranks(layout_checks.push_and_export, 2, str(path), str(tmp_path), json.dumps(layout), timeout=240)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("tied", {"pipeline": 2}),
        ("experts", EXPERT),
        pytest.param("experts", {"data": 2, **CONTEXT, "expert": 4}, marks=pytest.mark.slow),
    ],
)
def test_machines_push_their_own_parts_of_a_version_to_replicas(
    kind: str, layout: dict[str, int], model: Path, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    """Equally many ranks act as each of two machines. See `part_checks`."""
    path = tiny_family_model("qwen2_moe", tmp_path / "experts", num_experts=4) if kind == "experts" else model
    parallel = ParallelConfig(**layout, nodes=2)
    run_ranks(part_checks.check_push, parallel.world_size, str(path), parallel.model_dump_json(), redis_url, run_id, timeout=240)
