"""Training on several layouts, each of which continues from the previous one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme.config.trainer import ParallelConfig
from support import layout_checks
from support.ranks import run_ranks

TOLERANCE = 1e-5


def train_ranks(model: Path, layout: dict[str, int], out: Path, *runs: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Runs `layout_checks.run_orders` on a layout's ranks and reads its results from the file `out`."""
    order = {"model": str(model), "dtype": dtype, "out": str(out), "layout": layout, "runs": runs}
    run_ranks(layout_checks.run_orders, ParallelConfig(**layout).world_size, json.dumps(order), timeout=240)
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def a_run(steps: int, resume: Path | None = None, lora: dict[str, Any] | None = None, **save: Path) -> dict[str, Any]:
    """`save`: step_N=path."""
    saves = {name.removeprefix("step_"): str(path) for name, path in save.items()}
    return {"steps": steps, "resume": None if resume is None else str(resume), "save": saves, "lora": lora}


def agree(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close({name: found[name]}, {name: tensor}, rtol=0, atol=tolerance)


def check_chain(
    train: Callable[..., dict[str, Any]],
    layouts: Mapping[str, dict[str, int]],
    model: Path,
    want: list[list[float]],
    folder: Path,
    out: Path,
    lora: dict[str, Any] | None = None,
) -> None:
    """Compares loss, gradients (in the first moments of the first step) and weights after three steps. Then each layout continues from the
    third
    step of the previous layout, and again, to the same bits, from its own fourth step.

    Args:
        train: called with a layout and runs.
        want: expected loss and gradient norm of five steps on one rank, whose checkpoints `at-1` and `at-3` are in `folder`.
    """
    reference = [layout_checks.saved_state(model, folder / name) for name in ("at-1", "at-3")]
    before = folder / "at-3"
    for name, layout in layouts.items():
        at = {number: out / f"{name}-{number}" for number in (1, 3, 4, 5, 6)}
        found = train(
            layout,
            a_run(3, lora=lora, step_1=at[1], step_3=at[3]),
            a_run(2, resume=before, lora=lora, step_1=at[4], step_2=at[5]),
            a_run(1, resume=at[4], lora=lora, step_1=at[6]),
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
