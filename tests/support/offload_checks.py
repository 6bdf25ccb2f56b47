"""Programs for the ranks of test_offload: PPO iterations with and without offload, in one process after the other engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.models.model import ShardedModel
from polyreme_trainer.megatron.offload import optimizer_parts
from polyreme_trainer.megatron.run_engine import RunEngine
from polyreme_trainer.megatron.training.optimizer import Optimizer
from support.learning import Rank, start

PART_BYTES = 20_000
"""Small enough for several parts of the tiny models, which a test checks."""


def train_with_and_without(config_json: str, out: str) -> None:
    """Three iterations each, in float32 and bfloat16, without offload, with either kind and with both. Rank 0 writes what it saw.

    The last of them saves after iteration 2, and an engine without offload resumes there for iteration 3.
    """
    config, device = start(config_json)
    seen: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        runs = {
            "plain": OffloadConfig(),
            "optimizer": OffloadConfig(optimizer=True),
            "idle": OffloadConfig(idle_models=True),
            "both": OffloadConfig(optimizer=True, idle_models=True),
        }
        for name, offload in runs.items():
            if dtype == "float32" and name in ("optimizer", "idle"):
                continue
            changes = {
                "name": f"{config.name}-{dtype}-{name}",
                "model": config.model.model_copy(update={"dtype": dtype}),
                "trainer": config.trainer.model_copy(update={"offload": offload}),
            }
            device.seed(config.seed)
            with mock.patch.object(optimizer_parts, "PART_BYTES", PART_BYTES):
                seen[f"{dtype}-{name}"] = run(Rank(config.model_copy(update=changes), device), Path(out, f"{dtype}-{name}"))
        resumed = Rank(config.model_copy(update=changes | {"trainer": config.trainer}), device)
        assert resumed.engine.load() == 2
        resumed.iterate(3)
        resumed.write(Path(out, f"{dtype}-resumed"), {})
        resumed.engine.close()
    if torch.distributed.get_rank() == 0:
        Path(out, "seen.json").write_text(json.dumps(seen))


def run(rank: Rank, path: Path) -> dict[str, Any]:
    """Three iterations. Returns what was on the device at its fullest: the largest sums of bytes of weights, gradients and optimizer."""
    engine = rank.engine
    saves = path.name.endswith("both")
    if saves:
        rank.save(0)
    with watched(engine) as most:
        metrics = [rank.iterate(iteration) for iteration in (1, 2)]
        if saves:
            rank.save(2)
        metrics.append(rank.iterate(3))
    parts = engine.actor.optimizer._parts if engine.actor.optimizer else None
    moved = sum(each.pop("offload/moved_bytes", 0) for each in metrics)
    seen = {"most": most, "parts": 0 if parts is None else len(parts._parts), "moved": moved}
    rank.write(path, {"metrics": metrics})
    engine.close()
    return seen


@contextmanager
def watched(engine: RunEngine) -> Iterator[dict[str, int]]:
    """Sums what is on the device at every forward pass and at every part of an optimizer step, and keeps the largest sums."""
    most = {"models": 0, "weights": 0, "gradients": 0, "optimizer at a forward pass": 0, "optimizer at a step": 0}
    hidden, step = ShardedModel.hidden, torch.optim.AdamW.step
    roles = [*engine.saved, *([engine.reference] if engine.reference else [])]
    optimizers: list[Optimizer] = [role.optimizer for role in engine.trained if role.optimizer]

    def count(name: str, tensors: list[Tensor]) -> None:
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        most[name] = max(most[name], sum(storages.values()))

    def state() -> list[Tensor]:
        return [each for one in optimizers for fragment in one.fragments for each in fragment.state_tensors().values()]

    def at_forward(model: ShardedModel, *args: Any, **options: Any) -> Tensor:
        weights = [list(role.model.tensors()) for role in roles]
        there = sum(any(each.untyped_storage().nbytes() for each in tensors) for tensors in weights)
        most["models"] = max(most["models"], there)
        count("weights", [each for tensors in weights for each in tensors])
        count("gradients", [each for one in optimizers for each in one.gradients()])
        count("optimizer at a forward pass", state())
        return hidden(model, *args, **options)

    def at_step(adam: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        result = step(adam, *args, **options)
        count("optimizer at a step", state())
        return result

    with mock.patch.object(ShardedModel, "hidden", at_forward), mock.patch.object(torch.optim.AdamW, "step", at_step):
        yield most
