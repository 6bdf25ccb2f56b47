"""Optimizer state saved by data ranks, and the error of a resume in another layout. CPU, tiny model (tied, grouped-query, odd vocabulary).

    python bench/layouts.py

`dist_optimizer_bytes_ratio` (<= 0.6): bytes of a rank's optimizer state with two data ranks over those of a single rank.
`resume_other_layout_loss_diff` (<= 1e-5): one rank trains two steps and saves. Two data ranks resume, train one step and save, then two
tensor ranks, two pipeline stages, and one rank. The figure is the largest difference of their losses from those of one uninterrupted rank.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from learner_side.ranks import run_ranks

TARGET = {"dist_optimizer_bytes_ratio": 0.6, "resume_other_layout_loss_diff": 1e-5}
CHAIN: list[dict[str, int]] = [{"data": 2}, {"tensor": 2}, {"pipeline": 2}, {}]
ROWS, WIDTH = 6, 40


def save_model(path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 333,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128)
    Qwen2ForCausalLM(config).save_pretrained(path)


def child(order: dict[str, Any]) -> None:
    """Runs a rank, which loads, resumes, trains and saves. Rank 0 prints {losses, state_bytes}."""
    import numpy as np
    import torch

    from polyreme.config.trainer import ParallelConfig
    from polyreme_trainer.algorithms.metrics import Metrics
    from polyreme_trainer.learner.leader import Ranks
    from polyreme_trainer.megatron.batches.batch import MicroBatch, supervised
    from polyreme_trainer.megatron.checkpoints import checkpoint
    from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.huggingface.families import load_architecture
    from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
    from polyreme_trainer.megatron.models.policy import Policy
    from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
    from polyreme_trainer.megatron.parallel.shard import data_shard
    from polyreme_trainer.megatron.training.losses import over_ranks
    from polyreme_trainer.megatron.training.optimizer import Adam
    from polyreme_trainer.megatron.training.roles import LossTerm, Role

    device, path = Device("cpu"), Path(order["model"])
    init_parallel(ParallelConfig(**order["layout"]), device)
    channel = BroadcastChannel(device.torch) if torch.distributed.get_world_size() > 1 else None
    writer = CheckpointWriter(Ranks(torch.distributed.get_rank(), channel))
    policy = Policy(load_architecture(path), "float32", device, trainable=True)
    policy.load_hf(path)
    role = Role("actor", policy, lambda batch: policy.logprobs(batch.ids, batch.targets), data_shard(2 * WIDTH, device))
    role.make_optimizer(Adam())
    if order["resume"]:
        found = checkpoint.read(Path(order["resume"]))
        assert found is not None
        checkpoint.load(found, [role])
    random = np.random.default_rng(1)
    rows = supervised(
        list(random.integers(0, policy.arch.vocab, (ROWS, WIDTH), dtype=np.int32)), [np.ones(WIDTH, dtype=np.uint8)] * ROWS
    )
    count, losses = float(rows.trained.sum()), []

    def loss(batch: MicroBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        value = -logprobs.sum() / count
        return value, {"loss": (value.detach(), torch.ones(()))}

    for number in range(order["steps"]):
        metrics = role.forward_backward(LossTerm(rows, np.arange(ROWS), loss))
        role.optim_step(1e-3)
        losses.append(over_ranks(role.shard, metrics)["loss"][0])
        if number + 1 == order["save_at"]:
            writer.start(Save(Path(order["save"]), [role], dict, keep=1 + len(CHAIN)))
            writer.finish(wait=True)
    assert role.optimizer is not None
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": losses, "state_bytes": role.optimizer.state_bytes}), flush=True)
    close_parallel()


def train(model: Path, layout: dict[str, int], steps: int, **order: Any) -> dict[str, Any]:
    """Runs `child` on a layout's ranks. Returns the object that rank 0 prints."""
    defaults = {"resume": "", "save": "", "save_at": 0}
    world = max(1, *layout.values()) if layout else 1
    return run_ranks(Path(__file__), {**defaults, "model": str(model), "layout": layout, "steps": steps, **order}, world)


def measure(folder: Path) -> dict[str, float]:
    model = folder / "model"
    save_model(model)
    before = folder / "at-000002"
    straight = train(model, {}, 2 + len(CHAIN), save_at=2, save=str(before))
    differences, state_bytes = [], []
    for number, (layout, expected) in enumerate(zip(CHAIN, straight["losses"][2:], strict=True), start=3):
        after = folder / f"at-{number:06d}"
        found = train(model, layout, 1, resume=str(before), save_at=1, save=str(after))
        print(f"resumed as {layout or 'one rank'}: loss {found['losses'][0]:.7f}, uninterrupted {expected:.7f}", flush=True)
        differences.append(abs(found["losses"][0] - expected))
        state_bytes.append(found["state_bytes"])
        before = after
    return {
        "dist_optimizer_bytes_ratio": round(state_bytes[0] / straight["state_bytes"], 3),
        "resume_other_layout_loss_diff": max(differences),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    met = all(measured[name] <= most for name, most in TARGET.items())
    print(json.dumps({"bench": "layouts", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
