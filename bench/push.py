"""Writing a version from pipeline stages and expert ranks, compared with tensor ranks. Two ranks on CPU.

    python bench/push.py [--rounds 5] [--versions 10]

Every layout writes the same model into the arena; rank 0 computes the digests and seals the version, as in a run. The time per byte of a
layout is the median over `--rounds` pairs of processes, each of which writes `--versions` versions. The layouts take turns.

pipeline_vs_tensor  time per byte of two pipeline stages over that of two tensor ranks, dense model (<= 1.2)
expert_vs_tensor    the same for two expert ranks over two tensor ranks, model with experts (<= 1.2)
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from learner_side.ranks import run_ranks

TARGET = {"pipeline_vs_tensor": 1.2, "expert_vs_tensor": 1.2}
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tensor": ("dense", {"tensor": 2}),
    "pipeline": ("dense", {"pipeline": 2}),
    "tensor, experts": ("experts", {"tensor": 2}),
    "expert": ("experts", {"data": 2, "expert": 2}),
}
SIZES: dict[str, Any] = {
    "vocab_size": 8191,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}


def save_models(folder: Path) -> None:
    """Saves models of about 30 million parameters, with grouped queries and an odd vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=8, intermediate_size=1364)).save_pretrained(folder / "dense")
    experts: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "head_dim": 64}
    config = Qwen3MoeConfig(**SIZES, **experts, num_hidden_layers=4, norm_topk_prob=True)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")


def child(order: dict[str, Any]) -> None:
    """Runs a rank, which loads the model and writes versions. Rank 0 prints {seconds, nbytes}."""
    import os

    import torch.distributed as dist

    from polyreme.config.trainer import ParallelConfig
    from polyreme_trainer.learner.leader import Ranks
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.huggingface.families import load_architecture
    from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
    from polyreme_trainer.megatron.models.policy import Policy
    from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
    from polyreme_trainer.megatron.versions.version_writer import VersionWriter

    device, path = Device("cpu"), Path(order["model"])
    init_parallel(ParallelConfig(**order["layout"]), device)
    policy = Policy(load_architecture(path), "float32", device, trainable=True)
    policy.load_hf(path)
    ranks = Ranks(dist.get_rank(), BroadcastChannel(device.torch))
    writer = VersionWriter(policy, ranks, f"bench-push-{os.environ['MASTER_PORT']}", policy.writes).open()
    seconds = []
    for version in range(order["versions"] + 1):
        dist.barrier()
        began = time.perf_counter()
        written = writer.write(version % 3, version, 1)
        seconds.append(time.perf_counter() - began)
    if written.manifest is not None:
        print(json.dumps({"seconds": statistics.median(seconds[1:]), "nbytes": written.manifest.nbytes}), flush=True)
    writer.close()
    ranks.close()
    close_parallel()


def measure(folder: Path, rounds: int, versions: int) -> dict[str, float]:
    save_models(folder)
    costs: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(rounds):
        for name, (model, layout) in LAYOUTS.items():
            found = run_ranks(Path(__file__), {"model": str(folder / model), "layout": layout, "versions": versions}, 2)
            costs[name].append(found["seconds"] / found["nbytes"])
    medians = {name: statistics.median(each) for name, each in costs.items()}
    for name, cost in medians.items():
        print(f"{name:16} {cost * 1e9:.3f} ns per byte", flush=True)
    return {
        "pipeline_vs_tensor": round(medians["pipeline"] / medians["tensor"], 3),
        "expert_vs_tensor": round(medians["expert"] / medians["tensor, experts"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), arguments.rounds, arguments.versions)
    met = all(measured[name] <= most for name, most in TARGET.items())
    print(json.dumps({"bench": "push", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
