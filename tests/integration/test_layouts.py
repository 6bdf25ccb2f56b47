"""Layouts of the ranks: training is that of one rank, and a run resumes in another layout where it stopped.

The model has tied embeddings, grouped queries, biases and 45 tokens, so every rule of the mapping table is used, and padding too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme.config.trainer import ParallelConfig
from support import layout_checks
from support.models import tiny_family_model, tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
ONE: dict[str, int] = {}
TWO = {"tensor": {"tensor": 2}, "data": {"data": 2}, "pipeline": {"pipeline": 2}}
"""The layouts of two ranks."""
EXPERT = {"data": 2, "expert": 2}

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen2_moe", tmp_path_factory.mktemp("experts"), num_experts=6)


@pytest.fixture(scope="module")
def train(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs `layout_checks.follow` on a layout's ranks."""
    out = tmp_path_factory.mktemp("out") / "measured.json"

    def run(layout: dict[str, int], *runs: dict[str, Any], dtype: str = "float32", model: Path = model) -> dict[str, Any]:
        order = {"model": str(model), "dtype": dtype, "out": str(out), "layout": layout, "runs": runs}
        run_ranks(layout_checks.follow, ParallelConfig(**layout).world_size, json.dumps(order), timeout=240)
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured

    return run


def a_run(steps: int, resume: Path | None = None, **save: Path) -> dict[str, Any]:
    """`save`: step_N=path."""
    return {
        "steps": steps,
        "resume": None if resume is None else str(resume),
        "save": {name.removeprefix("step_"): str(path) for name, path in save.items()},
    }


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Five steps of one rank, and the folder of its checkpoints `at-1` and `at-3`."""
    folder = tmp_path_factory.mktemp("straight")
    return train(ONE, a_run(5, step_1=folder / "at-1", step_3=folder / "at-3")), folder


def test_training_is_that_of_one_rank_and_resumes_on_any_layout(
    train: Train, straight: tuple[dict[str, Any], Path], model: Path, tmp_path: Path
) -> None:
    expected, folder = straight
    check_chain({**TWO, "one": ONE}, train, model, expected["runs"][0], folder, tmp_path)


def test_expert_ranks_train_as_one_rank_and_a_run_leaves_and_enters_them(train: Train, experts: Path, tmp_path: Path) -> None:
    expected = train(ONE, a_run(5, step_1=tmp_path / "at-1", step_3=tmp_path / "at-3"), model=experts)["runs"][0]
    check_chain({"expert": EXPERT, "data": TWO["data"], "one": ONE}, train, experts, expected, tmp_path, tmp_path)


def check_chain(
    layouts: dict[str, dict[str, int]], train: Train, model: Path, want: list[list[float]], folder: Path, out: Path
) -> None:
    """Loss, gradients (in the first moments of the first step) and weights after three steps. Then each layout goes on from the third step
    of the layout before it, and once more, to the same bits, from its own fourth step.

    want: loss and gradient norm of five steps of one rank, whose checkpoints `at-1` and `at-3` are in `folder`.
    """
    reference = [layout_checks.saved_state(model, folder / name) for name in ("at-1", "at-3")]
    before = folder / "at-3"
    for name, layout in layouts.items():
        at = {number: out / f"{name}-{number}" for number in (1, 3, 4, 5, 6)}
        found = train(
            layout,
            a_run(3, step_1=at[1], step_3=at[3]),
            a_run(2, resume=before, step_1=at[4], step_2=at[5]),
            a_run(1, resume=at[4], step_1=at[6]),
            model=model,
        )
        fresh, resumed, again = found["runs"]
        assert fresh == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in want[:3]], name
        assert resumed == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in want[3:]], name
        assert again == resumed[1:], name
        for number, state in zip((1, 3), reference, strict=True):
            for kind, tensors in layout_checks.saved_state(model, at[number]).items():
                agree(tensors, state[kind], TOLERANCE)
        last, repeated = (layout_checks.saved_state(model, at[number]) for number in (5, 6))
        for kind in last:
            agree(repeated[kind], last[kind], 0.0)
        before = at[3]


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


FOUR = {
    "tied": [{"tensor": 2, "pipeline": 2}, {"data": 2, "pipeline": 2}],
    "experts": [{"tensor": 2, "pipeline": 2}, {**EXPERT, "tensor": 2}, {**EXPERT, "pipeline": 2}],
}


@pytest.mark.parametrize("kind", FOUR)
def test_stages_combine_with_other_ranks_and_with_experts(
    kind: str, train: Train, model: Path, experts: Path, tmp_path: Path
) -> None:
    """With experts, tensor ranks share the positions, and send each other's hidden states to the next stage."""
    model = experts if kind == "experts" else model
    first = tmp_path / "one-3"
    expected = train(ONE, a_run(3, step_3=first), model=model)["runs"][0]
    weights = layout_checks.saved_state(model, first)["weights"]
    for number, layout in enumerate(FOUR[kind], start=4):
        path = tmp_path / f"at-{number}"
        found = train(layout, a_run(3, step_3=path), model=model)["runs"][0]
        assert found == [pytest.approx(step, rel=TOLERANCE, abs=TOLERANCE) for step in expected], layout
        agree(layout_checks.saved_state(model, path)["weights"], weights, TOLERANCE)


@pytest.mark.parametrize(("kind", "layout"), [("tied", {"pipeline": 2}), ("untied", {"pipeline": 2}), ("experts", EXPERT)])
def test_a_version_that_several_ranks_write_is_the_exported_model_bit_for_bit(
    kind: str, layout: dict[str, int], experts: Path, tmp_path: Path
) -> None:
    path = experts if kind == "experts" else tiny_model("tied" if kind == "tied" else "untied", tmp_path / "model")
    run_ranks(layout_checks.push_and_export, 2, str(path), str(tmp_path), json.dumps(layout), timeout=240)
